"""Every error that bolegen raises on purpose, one class a subject."""

__all__ = [
    "BolegenError",
    "CheckError",
    "EmitError",
    "OutputError",
    "ProofError",
    "SpecError",
    "TreeError",
]


class BolegenError(Exception):
    """Base of all errors below; the message names the thing, the rule, the value, the way out."""


class TreeError(BolegenError):
    """The template text or its parents do not describe one rooted tree of 1 to 512 nodes."""


class SpecError(BolegenError):
    """A mixer, shape, dtype, depth, solver or target that cannot be compiled."""


class OutputError(BolegenError):
    """The result could not be written where the user asked."""


class CheckError(BolegenError):
    """A plan breaks an invariant, or checked-in modules differ from what is emitted now."""


class EmitError(BolegenError):
    """A template is broken or emitted text is not valid Python; always a bolegen bug."""


class ProofError(BolegenError):
    """A claimed property of a plan is false; the message names the first node that breaks it."""

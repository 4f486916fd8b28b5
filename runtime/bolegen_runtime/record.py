"""What the text of a generated module says of itself, read without running it; its import.

The text that was checked is the text that runs: a file is read once, and Triton, which wants
each kernel's source, gets the same text from linecache. So no file is needed at all.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

__all__ = ["LoadError", "digest_of", "import_text", "read_record"]

_DIGEST = re.compile(r"^digest    ([0-9a-f]{16})$", re.MULTILINE)
_RECORD = re.compile(r"^MODULE = Module\($.*?^\)$", re.MULTILINE | re.DOTALL)


class LoadError(RuntimeError):
    """A module that cannot be found, or whose text is not what the compiler wrote."""


def digest_of(text: str) -> str | None:
    """The digest that the compiler gives this text: of everything but the digest itself.

    Sixteen hexadecimal digits of a SHA-256; None for a text without a digest line.
    """
    found = _DIGEST.search(text)
    if not found:
        return None
    bare = text.replace(found.group(1), "0" * 16)
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def read_record(text: str) -> dict[str, object] | None:
    """Fields of MODULE in a generated text, read and not run; None where there is no MODULE.

    A dtype is its name in torch: bfloat16. Raises LoadError for a MODULE of something else.
    """
    found = _RECORD.search(text)
    if not found:
        return None
    try:
        call = cast(ast.Call, cast(ast.Assign, ast.parse(found.group()).body[0]).value)
        fields = {str(field.arg): _literal(field.value) for field in call.keywords}
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"its MODULE record cannot be read: {error}") from error
    missing = {"name", "parents", "nodes", "digest"} - set(fields)
    if missing:
        raise LoadError(f"its MODULE record has no {', '.join(sorted(missing))}")
    if not _is_tree(fields["parents"], fields["nodes"]):
        raise LoadError(
            f"its MODULE record has parents {fields['parents']!r:.60}, which are no tree"
        )
    return fields


def _is_tree(parents: object, nodes: object) -> bool:
    """Whether parents are None, or ``nodes`` numbers, each below its node's own."""
    if parents is None:
        return isinstance(nodes, int)
    return (
        isinstance(parents, tuple)
        and len(parents) == nodes
        and all(
            isinstance(parent, int) and min(node, 1) - 1 <= parent < node
            for node, parent in enumerate(parents)
        )
    )


def _literal(value: ast.expr) -> object:
    return value.attr if isinstance(value, ast.Attribute) else ast.literal_eval(value)


def import_text(text: str, path: Path | None) -> ModuleType:
    """Import under a name made of the digest, so that one text is one module.

    ``path`` is where readers find the text, and is not read. Raises LoadError for a text without
    a record, or whose digest is not its own.
    """
    where = str(path or "the compiled text")
    record = read_record(text)
    if record is None or record["digest"] != digest_of(text):
        raise LoadError(f"{where} is not what the compiler wrote: its digest differs")
    name = f"bolegen_generated_{record['digest']}"
    if name in sys.modules:
        return sys.modules[name]
    origin = str(path or f"<bolegen>/{record['name']}-{record['digest']}.py")
    spec = importlib.machinery.ModuleSpec(name, _CheckedText(text), origin=origin)
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    # no time of change: linecache then never looks at the file
    linecache.cache[origin] = (len(text), None, text.splitlines(keepends=True), origin)
    sys.modules[name] = module
    try:
        exec(compile(text, origin, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _CheckedText(importlib.abc.InspectLoader):
    """The source for tracebacks and for inspect, from memory."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

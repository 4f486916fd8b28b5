"""kernels -> text: the one Jinja environment, the header, the digest, the atomic write."""

import hashlib
import os
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from bolegen.errors import EmitError, OutputError
from bolegen.ir import KernelModule, Solver, TreePlan, spell_template
from bolegen.version import __version__

__all__ = [
    "TEMPLATES",
    "EmittedModule",
    "describe_numerics",
    "digest_of",
    "emit_module",
    "write_module",
]

TEMPLATES = (
    "header",
    "numerics",
    "topology",
    "convolve",
    "gates",
    "channels",
    "rows",
    "prepare",
    "walk",
    "pairs",
    "factor",
    "solve",
    "replay",
    "commit",
    "accept",
    "memory",
    "calls",
    "commits",
    "checks",
)
_NO_DIGEST = "0" * 16
_WIDTH = 83


@dataclass(frozen=True)
class EmittedModule:
    """One generated module: its name, its whole text, the plan and kernels it came from."""

    name: str
    text: str
    digest: str
    plan: TreePlan
    module: KernelModule


def emit_module(plan: TreePlan, module: KernelModule) -> EmittedModule:
    """Render every template in order; the text is deterministic and carries its own digest.

    Raises EmitError where a template is broken or the text does not parse.
    """
    context = dict(module.context) | _header(plan, module) | {"digest": _NO_DIGEST}
    try:
        parts = [_environment().get_template(f"{t}.py.jinja").render(context) for t in TEMPLATES]
    except jinja2.TemplateError as error:
        where = getattr(error, "filename", None) or "a template"
        line = getattr(error, "lineno", None)
        raise EmitError(f"{where}{f':{line}' if line else ''}: {error}") from error
    text = _tidy("\n\n\n".join(part.strip("\n") for part in parts))
    try:
        # to bytecode, which is thrown away: quicker than a tree of Python objects
        compile(text, module.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise EmitError(f"module {module.name}, line {error.lineno}: {error.msg}") from error
    digest = digest_of(text)
    return EmittedModule(module.name, text.replace(_NO_DIGEST, digest), digest, plan, module)


def digest_of(text: str) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of ``text``, its own digest left out."""
    found = re.search(r"^digest    ([0-9a-f]{16})$", text, re.MULTILINE)
    bare = text.replace(found.group(1), _NO_DIGEST) if found else text
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def write_module(module: EmittedModule, folder: Path) -> Path:
    """Write ``module`` into ``folder``, made if missing, in one step; returns the file.

    A killed run leaves the old file or none. Raises OutputError where nothing can be written.
    """
    path = folder / f"{module.name}.py"
    partial = folder / f".{module.name}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(module.text, "utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder with --out"
        ) from error
    return path


class _Compiled(jinja2.FileSystemBytecodeCache):
    """Compiled templates beside their sources, as Python keeps its own; optional like those."""

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Keep one compiled template, where the folder can be written."""
        with suppress(OSError):
            Path(self.directory).mkdir(exist_ok=True)
            super().dump_bytecode(bucket)


@cache
def _environment() -> jinja2.Environment:
    folder = Path(__file__).parent.parent / "templates"
    names = f"%s.{sys.implementation.cache_tag}"
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        bytecode_cache=_Compiled(str(folder / "__pycache__"), names),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _tidy(text: str) -> str:
    """Two blank lines between definitions, at most one inside them."""
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return re.sub(r"[ \t]+\n", "\n", text).rstrip("\n") + "\n"


def _header(plan: TreePlan, module: KernelModule) -> dict[str, object]:
    tree, spec = plan.tree, plan.spec
    template = spell_template(tree)
    count = "at most " if not tree.is_static else ""
    dropped = plan.depth - plan.steps
    drop = f", {dropped} vanish" if dropped else ""
    launches = [kernel.name.partition("_")[0] for kernel in module.kernels if not kernel.label]
    return {
        "title": f"Tree verifier for {spec.mixer.name}: {_shorten(template, 24)}, "
        f"{count}{tree.nodes} nodes, depth {plan.depth}.",
        "template": _shorten(template, _WIDTH),
        "parents": _shorten(_spell(tree.parents), _WIDTH),
        "parents_literal": _literal(tree.parents),
        "rows_literal": _wrap(module.context["places"]),
        "tree_literal": _wrap(module.context["keeps_tree"]),
        "depth_line": f"{plan.depth} supported; {plan.steps} products with G needed{drop}"
        if spec.mixer.delta
        else f"{plan.depth} supported",
        "proof": _proof(plan),
        "layer": f"heads {spec.key_heads}:{spec.value_heads}, dims {spec.d_k}:{spec.d_v}, "
        f"{f'convolution {spec.conv}, ' * spec.mixer.convolved}activations {spec.dtype.value}, "
        f"state {spec.state_dtype.value}",
        "numerics": describe_numerics(plan),
        "factor_line": f"{spec.factors}, {spec.factor_bytes} bytes a node "
        f"(a state snapshot: {spec.snapshot_bytes})",
        "solver_line": _solver(plan),
        "launches": ", ".join(launches[:-1]) + "; commit for all layers",
        "version": __version__,
    }


def _proof(plan: TreePlan) -> str:
    if not plan.spec.mixer.delta:
        return "no delta term, so G = 0 and U = R; see `bolegen prove`"
    if plan.tree.is_static:
        return f"by support: G^{plan.steps + 1} = 0, G^{plan.steps} != 0; see `bolegen prove`"
    return f"by support: G^{plan.depth + 1} = 0 for every tree of depth {plan.depth} or less"


def describe_numerics(plan: TreePlan) -> str:
    """The contract, and how the state, Y and R enter their products."""
    spec, terms = plan.spec, plan.precision.state_terms
    how = {0: f"whole, {plan.precision.dot}", 1: "exact in bf16", 2: "in two bf16 terms"}[terms]
    y = f"Y in {plan.precision.fold or plan.precision.dot}" if spec.mixer.delta else "Y = C"
    if plan.precision.readout_terms:
        y += ", then bf16, as R" if spec.readout == "bf16" else " and two bf16 terms, as R"
    contract = spec.contract if spec.readout == "split" else f"{spec.contract}, readout bf16"
    return f"contract {contract}; state {how}; {y}"


def _solver(plan: TreePlan) -> str:
    blocks = ", ".join(f"{b.rows}{'' if b.column else ' leaves'}" for b in plan.blocks)
    if not plan.spec.mixer.delta:
        return f"none; {plan.column_count} columns of C"
    text = f"{plan.solver.value}; blocks of {blocks}; {plan.column_count} columns of G"
    if len(text) > _WIDTH:
        text = f"{plan.solver.value}; {len(plan.blocks)} blocks; {plan.column_count} columns of G"
    return text if plan.solver is not Solver.LEVELS else f"{text}; no product inside a block"


def _literal(parents: tuple[int, ...] | None) -> str:
    """A tuple as the formatter lays it out: on one line where it fits, else one item a line."""
    if parents is None:
        return "None"
    line = _spell(parents)
    if len(f"    parents={line},") <= 99:
        return line
    return "(\n" + "".join(f"        {parent},\n" for parent in parents) + "    )"


def _wrap(rows: object) -> str:
    """A list on one line where it fits, else in full lines, which the formatter is to leave."""
    text = str(rows)
    if len(f"ROWS_OF = {text}") <= 95:
        return text
    lines = textwrap.wrap(text[1:-1] + ",", 95, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(["[", *lines, "]  # fmt: skip"])


def _spell(parents: tuple[int, ...] | None) -> str:
    return "given at run time" if parents is None else str(parents)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 4].rstrip(', ')} ..."

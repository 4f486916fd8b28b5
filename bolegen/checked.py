"""The modules that are checked in under generated/: written and compared by ``bolegen check``."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from bolegen.codegen import EmittedModule, compile_template, write_module
from bolegen.errors import CheckError
from bolegen.ir import KDA, MAMBA2, DType, LayerSpec

__all__ = ["CHECKED_IN", "CheckedIn", "compare_folder", "compile_all", "write_folder"]


@dataclass(frozen=True)
class CheckedIn:
    """One module to read: its template, depth and layer."""

    template: str
    depth: int | None = None
    spec: LayerSpec = field(default_factory=LayerSpec)


# few, and each for a reason
CHECKED_IN = (
    CheckedIn("(3,3,3)", 8),  # the tree of the papers; three of eight powers remain
    CheckedIn("(3,3,3)", 8, LayerSpec(factors="pku")),  # the same with the paper's P, K, U
    CheckedIn("chain:8"),  # no branch at all
    CheckedIn("any:64", 8),  # topology at run time
    CheckedIn(  # ragged, with odd dims and a bf16 pool: OLMo-Hybrid's heads
        "parents:[-1,0,0,1,1,2,3,3,6,6,8]",
        spec=LayerSpec(key_heads=30, value_heads=30, d_k=96, d_v=192, state_dtype=DType.BF16),
    ),
    CheckedIn("any:64", 8, LayerSpec(KDA, 32, 32)),  # a decay per key channel: Kimi-Linear's heads
    CheckedIn("any:64", 8, LayerSpec(MAMBA2, 8, 128, d_v=64)),  # no delta term: Nemotron-H's heads
)


def compile_all() -> tuple[EmittedModule, ...]:
    """What generated/ should hold."""
    return tuple(compile_template(c.template, c.spec, depth=c.depth) for c in CHECKED_IN)


def write_folder(folder: Path) -> list[Path]:
    """Write every checked-in module into ``folder``; returns the files."""
    return [write_module(module, folder) for module in compile_all()]


def compare_folder(folder: Path) -> int:
    """How many modules in ``folder`` are what the compiler emits now: all of them.

    Raises CheckError with the first difference and the command that refreshes the folder.
    """
    modules = {f"{module.name}.py": module.text for module in compile_all()}
    found = {path.name for path in folder.glob("*.py")}
    for name in sorted(found - set(modules)):
        raise CheckError(f"{folder / name} is not in the list of bolegen/checked.py; remove it")
    for name, text in modules.items():
        path = folder / name
        have = path.read_text("utf-8") if path.is_file() else ""
        if have != text:
            raise CheckError(
                f"{path} {'differs' if have else 'is missing'}{_first_change(have, text)}; "
                "run `bolegen check --write` and read the diff"
            )
    return len(modules)


def _first_change(have: str, text: str) -> str:
    lines = difflib.unified_diff(have.splitlines(), text.splitlines(), lineterm="", n=0)
    changes = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return f", first at {changes[0]!r}" if have and changes else ""

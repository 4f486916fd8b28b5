"""README's table of mixers, from their descriptions, what compiles, and docs/validation.json.

``python -m benchmarks.features`` writes it anew.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import fill, table
from bolegen.codegen import compile_template
from bolegen.errors import SpecError
from bolegen.ir import FACTOR_LAYOUTS, MIXERS, LayerSpec, Mixer

__all__ = ["fill_page", "main", "on_a_gpu", "tables"]

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "README.md", ROOT / "docs/validation.json"
TREES = {"static": "(3,3,3)", "run-time": "any:64"}


def main() -> int:
    """Write the table into README.md."""
    record = json.loads(RECORD.read_text("utf-8"))
    PAGE.write_text(fill_page(PAGE.read_text("utf-8"), record), "utf-8")
    return 0


def fill_page(page: str, record: dict[str, Any]) -> str:
    """The page with its table of mixers written anew; ``record`` is what a GPU was tested with."""
    return fill(page, "mixers", tables(record))


def tables(record: dict[str, Any]) -> str:
    """One row a mixer."""
    head = ["mixer", "decay", "delta term", "write gate", "convolution", "q, k", "trees",
            "factor layouts", "run on a GPU"]  # fmt: skip
    return table(head, [_row(mixer, record) for mixer in MIXERS.values()])


def on_a_gpu(mixer: Mixer, record: dict[str, Any]) -> bool:
    """Whether every GPU test that names the mixer passed, and there is one.

    Names hold it as a parameter, [mamba2-...]; the shapes of test_h200 are gdn's.
    """
    tests = [
        test
        for test in record["tests"]
        if mixer.name in test["name"].partition("[")[2].rstrip("]").split("-")
        or (mixer.name == "gdn" and test["name"].startswith("test_h200::"))
    ]
    return bool(tests) and all(test["outcome"] == "passed" for test in tests)


def _row(mixer: Mixer, record: dict[str, Any]) -> list[str]:
    works = {
        (kind, layout)
        for kind, template in TREES.items()
        for layout in FACTOR_LAYOUTS
        if _compiles(template, LayerSpec(mixer, factors=layout))
    }
    return [
        f"`{mixer.name}`",
        mixer.decay.value,
        "yes" if mixer.delta else "no: G = 0",
        "none" if mixer.write_gate == "1" else mixer.write_gate,
        "yes" if mixer.convolved else "no",
        "l2-normalised" if mixer.unit_keys else "as they are",
        ", ".join(kind for kind in TREES if any(kind == have for have, _ in works)) or "none",
        ", ".join(f for f in FACTOR_LAYOUTS if any(f == have for _, have in works)) or "none",
        "yes" if on_a_gpu(mixer, record) else "not yet",
    ]


def _compiles(template: str, spec: LayerSpec) -> bool:
    try:
        compile_template(template, spec, depth=8)
    except SpecError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

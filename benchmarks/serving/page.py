"""Fill docs/evaluation.md from docs/serving: python -m benchmarks.serving.page [--check].

It draws docs/plots/offline-SHAPE.svg too, where matplotlib is installed.
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.records import name, read_records
from benchmarks.pages import fill, table, update
from benchmarks.serving.check import find_faults
from benchmarks.serving.offline_page import (
    OFFLINE,
    SHAPES,
    draw_nodes,
    write_chains,
    write_shares,
)
from benchmarks.serving.report import (
    LOADS,
    MEMORY,
    figures,
    list_loads,
    list_memory,
    loads_of,
)

__all__ = ["NOT_RUN", "compare_loads", "main", "write_page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE, FOLDER = ROOT / "docs" / "evaluation.md", ROOT / "docs" / "serving"
NOT_RUN = "Not yet run.\n"
# with less the better, in the table of gains
LESS = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99")
GAINS = ["load", "system", "beside", "TTFT: mean", "p99", "TPOT: mean", "p99",
         "found cached, points", "loses in"]  # fmt: skip
Records = list[dict[str, Any]]


def compare_loads(records: Records) -> list[list[str]]:
    """Rows under GAINS: how many times as fast, of medians over seeds; checked systems alone."""
    held = [record for record in records if not find_faults(record)]
    return [
        [f"{load:g}", name(ours), name(other), *_beside(ours, other, load)]
        for ours in held
        for other in held
        if ours["plugin"] and not other["plugin"]
        for load in loads_of(ours)
    ]


def _beside(ours: dict[str, Any], other: dict[str, Any], load: float) -> list[str]:
    mine, theirs = ([figures(run) for run in loads_of(record)[load]] for record in (ours, other))

    def middle(found: list[dict[str, float]], key: str) -> float:
        return statistics.median(f[key] for f in found)

    ratios = {key: middle(theirs, key) / middle(mine, key) for key in LESS}
    points = middle(mine, "hit_rate") - middle(theirs, "hit_rate")
    lost = [key.replace("_", " ").upper().replace("MEAN", "mean").replace("P99", "p99")
            for key, ratio in ratios.items() if ratio < 1]  # fmt: skip
    cells = [f"{ratio:.2f}" for ratio in ratios.values()]
    return [*cells, f"{points:+.1f}", ", ".join(lost) or "-"]


def write_gains(runs: Records) -> str:
    """What a user gains and where they do not."""
    return table(GAINS, compare_loads(runs))


def write_loads(runs: Records) -> str:
    """Every figure of every system and load, and what it was run on."""
    settings, versions = runs[0]["settings"], runs[0]["versions"]
    said = ", ".join(f"{key} {value}" for key, value in settings["shape"].items())
    extra = ", ".join(f"{key} {value}" for key, value in settings["extra"].items()) or "none"
    about = (
        f"{versions['device']}, SGLang {versions['sglang']}, torch {versions['torch']}, Triton "
        f"{versions['triton']}; {said}; loads are fractions of {settings['rate']:g} "
        f"conversations a second; seeds {settings['seeds']}; further engine arguments: {extra}.\n"
    )
    return f"{about}\n{table(LOADS, list_loads(runs))}"


def write_memory(runs: Records) -> str:
    """What each system reserves, by its own log."""
    return table(MEMORY, list_memory(runs))


WRITERS: dict[str, Callable[[Records], str]] = {
    "gains": write_gains,
    "loads": write_loads,
    "memory": write_memory,
}


def write_page(page: str, folder: Path) -> str:
    """The page with every table made anew from the folder's newest files."""
    for what in ("online", "online9b"):
        files = sorted(folder.glob(f"*-{what}.jsonl"))
        runs = read_records(files[-1:])[0]
        for mark, write in WRITERS.items():
            page = fill(page, f"{what} {mark}", write(runs) if runs else NOT_RUN)
    offline = read_shapes(folder, "offline")
    for mark, list_all in OFFLINE.items():
        page = fill(page, f"offline {mark}", list_all(offline) if offline else NOT_RUN)
    page = fill(page, "chains", write_chains(read_shapes(folder, "chains")) or NOT_RUN)
    shares = read_shapes(folder, "shares")
    said = write_shares([*shares.values(), *offline.values()])
    return fill(page, "shares", said or NOT_RUN)


def read_shapes(folder: Path, what: str) -> dict[str, Records]:
    """The newest records of every model's shapes."""
    files = {shape: sorted(folder.glob(f"*-{what}-{shape}.jsonl"))[-1:] for shape in SHAPES}
    return {shape: read_records(found)[0] for shape, found in files.items() if found}


def main() -> None:
    """Write the page and the plots."""
    update(PAGE, lambda held: write_page(held, FOLDER))
    if "--check" not in sys.argv and importlib.util.find_spec("matplotlib"):
        for shape, records in read_shapes(FOLDER, "offline").items():
            draw_nodes(records, PAGE.parent / "plots" / f"offline-{shape}.svg")


if __name__ == "__main__":
    main()

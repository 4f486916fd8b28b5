"""The table of mixers other than gdn: ours beside the peer's verifier of trees, and the floor."""

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["mixer_table"]

Line = dict[str, Any]
PARTS = ("core", "solve")


def mixer_table(
    lines: Iterable[Line], find: Callable[[str, str], Line | None]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: ``lines`` are ours of each case, ``find`` gives a case's line of a system.

    A peer is timed on the tree by name, once; ``any:`` asks ours to learn it at run time.
    """
    head = ["mixer", "model", "tree", "T", "B", "part", "SGLang", "ours", "least to most",
            "speed-up", "floor", "over the floor"]  # fmt: skip
    rows = []
    for line in lines:
        for part in PARTS:
            mine = find(line["case"], f"ours.{part}")
            theirs = find(line["case"].replace("any:", ""), f"sglang.{part}")
            if mine is not None:
                rows.append([*_name(line), part, *_cells(mine, theirs)])
    return head, rows


def _name(line: Line) -> list[str]:
    return [str(line[field]) for field in ("mixer", "model", "tree", "nodes", "batch")]


def _cells(mine: Line, theirs: Line | None) -> list[str]:
    """Only lines of one run make a ratio."""
    if theirs is not None and theirs["run"] != mine["run"]:
        theirs = None
    us, floor = mine["us"], mine["floor_us"]
    return [
        "" if theirs is None else f"{theirs['us']:.1f}",
        f"{us:.1f}",
        f"{mine['min_us']:.1f} to {mine['max_us']:.1f}",
        "" if theirs is None else f"{theirs['us'] / us:.2f}x",
        f"{floor:.1f}",
        f"{us / floor:.2f}x",
    ]

"""The table that sets accuracy against speed: each numerics of ours, its time and its errors."""

from collections.abc import Iterable
from typing import Any

from benchmarks.cases import NUMERICS

__all__ = ["accuracy_table"]

_TITLES = {"fp32": "fp32 contract", "tf32": "tf32", "bf16-readout": "bf16 readout"}
_PLACE = ("model", "tree", "nodes", "batch", "state")


def accuracy_table(lines: Iterable[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of JSON lines of the suite: a row for each place and part of the core.

    Errors are relative, in norms over a head: the largest of O and of the committed state.
    """
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for line in lines:
        part = line["system"].partition(".")[2]
        place = (*(line[field] for field in _PLACE), part)
        found.setdefault(place, {})[line["numerics"]] = line
    head = ["model", "tree", "T", "B", "state", "part"]
    for numerics in NUMERICS:
        head += [_TITLES[numerics], "O, state"]
    rows = []
    for place, by in found.items():
        cells = [cell for numerics in NUMERICS for cell in _cells(by.get(numerics))]
        rows.append([*map(str, place), *cells])
    return head, rows


def _cells(line: dict[str, Any] | None) -> tuple[str, str]:
    if line is None:
        return "", ""
    errors = line["errors"]
    return f"{line['us']:.1f}", f"{errors['o']:.1e}, {errors['state']:.1e}"

"""Rounds that benchmarks play are the module's own, and the page says what was found."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rejects import _path
from benchmarks.replays import _cut, _pick
from benchmarks.rounds import _page

RECORD: dict[str, Any] = {
    "device": {"device": "a GPU", "torch": "2.11", "triton": "3.6", "python": "3.12"},
    "replays": {
        "module": "gdn_any64_d8",
        "layers": 24,
        "batches": (1, 4, 8),
        "rounds": 1000,
        "bit-equal to eager": 1000,
        "judged by the oracle": 4,
        "worst error over its limit": {"o": 0.9, "state": 0.25},
        "rows": {"all": 4500, "padded": 600, "nodes": 150000, "dead nodes": 31000},
        "allocations": 0,
        "compilations": 0,
        "launches of a round": {"solve": 24, "commit": 1},
    },
    "rejects": {
        "module": "gdn_any16_d6",
        "rounds": 10000,
        "rows of a round": 8,
        "tokens accepted": 123456,
        "worst error over its limit": {"state": 0.5},
    },
}


def test_the_page_holds_every_figure() -> None:
    page = _page(RECORD)
    for said in (
        "on a GPU, torch 2.11, Triton 3.6, Python 3.12.",
        "| rounds replayed | 1,000, ",
        "4,500, 600 of them padded",
        "150,000, 31,000 of them dead",
        "| bit-equal to eager | 1,000 of 1,000 rounds |",
        "o 0.900, state 0.250",
        "| allocations, compilations, waits | 0, 0, 0 |",
        "25: commit 1, solve 24",
        "10,000 of `gdn_any16_d6`, 123,456 tokens accepted",
        "| errors over their limits, serial recurrence | state 0.500 |",
    ):
        assert said in page


def test_what_is_too_deep_dies_with_what_hangs_below() -> None:
    m: Any = SimpleNamespace(MODULE=SimpleNamespace(depth=2))
    parents, live = _cut(m, [-1, 0, 1, 2, 0, 3], [True, True, True, True, True, True])
    assert live == [True, True, True, False, True, False]
    assert parents == [-1, 0, 1, -1, 0, -1]


@pytest.mark.parametrize("last", [-1, 10_000, 2])
def test_nothing_is_accepted_of_what_is_not_there(last: int) -> None:
    assert _path([-1, 0, -1], [True, True, False], last) == []


def test_an_accepted_path_begins_at_the_root() -> None:
    assert _path([-1, 0, 1], [True, True, True], 2) == [0, 1, 2]
    numbers = random.Random(0)
    picked = {_pick(numbers, [True, False, True]) for _ in range(200)}
    assert picked >= {-1, 0, 1, 2, 10_000}

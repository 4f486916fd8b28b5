"""Ours passes the benchmark's judge, and what is wrong does not."""

import dataclasses

import pytest

from benchmarks.cases import Case
from benchmarks.contest import ours
from benchmarks.operands import draw_operands
from benchmarks.systems import System
from benchmarks.timing import WrongResultError, judge
from benchmarks.traffic import floor_bytes

STATIC = Case("verify", "tiny", "random12d4", 2)


def play(system: System) -> dict[str, float]:
    system.prepare()
    for layer in range(2 if system.layers == 1 else 1):
        output = system.run(layer)
    return judge(system, layer, output)


@pytest.mark.parametrize("tree", ["random12d4", "any:random12d4"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_our_verify_is_right(tree: str, state: str) -> None:
    case = dataclasses.replace(STATIC, tree=tree, state=state)
    _, entries = ours(case, draw_operands(case, 2, "cpu"))
    core, solve = (play(entry()) for entry in entries[:2])
    assert set(core) == {"o", "state", "window"}
    assert set(solve) == {"o", "state"}


def test_our_commit_is_right() -> None:
    case = dataclasses.replace(STATIC, suite="commit")
    mine, (entry,) = ours(case, draw_operands(case, 2, "cpu"))
    system = entry()
    assert system.layers == 2
    assert set(play(system)) == {"state", "window"}
    assert mine.factors.round_bytes > 0


def test_a_wrong_answer_has_no_speed() -> None:
    _, entries = ours(STATIC, draw_operands(STATIC, 2, "cpu"))
    system = entries[0]()
    system.prepare()
    output = system.run(1)
    output[1, 3] += 0.01
    with pytest.raises(WrongResultError, match=r"ours\.core"):
        judge(system, 1, output)


def test_the_traffic_kernel_runs_and_the_floor_counts_its_bytes() -> None:
    r = draw_operands(STATIC, 2, "cpu")
    assert play(ours(STATIC, r)[1][3]()) == {"o": 0.0}
    # state, rows, gates, outputs, stored rows and gates of 2 requests with 12 nodes
    channels = 2 * 16 + 2 * 16
    want = 2 * 2 * 16 * 16 * 4 + 24 * (2 * channels + 8 + 2 * channels + 16 + 2 * 2 * 16)
    assert floor_bytes(r, convolved=False) == want
    assert floor_bytes(r, convolved=True) == want - 24 * 2 * 16

"""Ours passes the benchmark's judge, and what is wrong does not."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks import contest, timing
from benchmarks.cases import NUMERICS, Case
from benchmarks.operands import Operands, draw_operands
from benchmarks.systems import Ours, System
from benchmarks.timing import WrongResultError, judge
from benchmarks.traffic import floor_bytes

STATIC = Case("verify", "tiny", "random12d4", 2)


def ours(r: Operands) -> tuple[Ours, list[contest.Entry]]:
    return contest.ours(r.case, r, contest.remember(r))


def play(system: System) -> dict[str, float]:
    system.prepare()
    for layer in range(2 if system.layers == 1 else 1):
        output = system.run(layer)
    return judge(system, layer, output)


@pytest.mark.parametrize(("tree", "state"), [("random12d4", "fp32"), ("any:random12d4", "bf16")])
def test_our_verify_is_right(tree: str, state: str) -> None:
    case = dataclasses.replace(STATIC, tree=tree, state=state)
    _, entries = ours(draw_operands(case, 2, "cpu"))
    core, solve = (play(entry()) for entry in entries[:2])
    assert set(core) == {"o", "state", "window"}
    assert set(solve) == {"o", "state"}


def test_each_numerics_is_right_by_its_own_limits_and_says_how_far_it_errs() -> None:
    errors = {}
    for numerics in NUMERICS:
        case = dataclasses.replace(STATIC, suite="accuracy", numerics=numerics)
        mine, entries = ours(draw_operands(case, 2, "cpu"))
        assert len(entries) == 2
        play(entries[0]())
        play(entries[1]())
        errors[numerics] = mine.errors(1)
    assert errors["fp32"]["o"] < errors["bf16-readout"]["o"] < 4e-3
    assert len({each["state"] for each in errors.values()}) == 1
    assert errors["fp32"]["state"] < 1e-6


def test_limits_of_the_opt_ins_do_not_loosen_the_default() -> None:
    _, entries = ours(draw_operands(STATIC, 2, "cpu"))
    system = entries[0]()
    system.prepare()
    output = system.run(1)
    output *= 1 + 2**-8
    with pytest.raises(WrongResultError, match=r"'o': [1-9]"):
        judge(system, 1, output)


def test_our_commit_is_right() -> None:
    case = dataclasses.replace(STATIC, suite="commit")
    mine, (entry,) = ours(draw_operands(case, 2, "cpu"))
    system = entry()
    assert system.layers == 2
    assert set(play(system)) == {"state", "window"}
    assert mine.factors.round_bytes > 0


def test_our_round_is_right_in_two_steps_and_folded() -> None:
    case = dataclasses.replace(STATIC, suite="round")
    _, entries = ours(draw_operands(case, 2, "cpu"))
    for entry, name in zip(entries, ("ours.apart", "ours.folded"), strict=True):
        system = entry()
        assert (system.name, system.layers) == (name, 2)
        assert set(play(system)) == {"o", "state", "window"}


def test_a_wrong_answer_has_no_speed() -> None:
    _, entries = ours(draw_operands(STATIC, 2, "cpu"))
    system = entries[0]()
    system.prepare()
    output = system.run(1)
    output[1, 3] += 0.01
    with pytest.raises(WrongResultError, match=r"ours\.core"):
        judge(system, 1, output)


class Replayed:
    """A graph that runs everything again, and may go wrong from some replay on."""

    def __init__(self, run: Callable[[int], Any], sets: int, good: int) -> None:
        self.run, self.sets, self.left = run, sets, good
        self.outputs = [run(i).clone() for i in range(sets)]

    def replay(self) -> None:
        for i, output in enumerate(self.outputs):
            output.copy_(self.run(i))
        self.left -= 1
        if self.left < 0:
            self.outputs[-1] *= 1.5


@pytest.mark.parametrize(("good", "said"), [(0, "over limit"), (1, "differs"), (2, "")])
def test_replays_are_judged_before_and_after_the_timing(
    good: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Callable[[int], Any], sets: int) -> tuple[Replayed, list[Any]]:
        graph = Replayed(run, sets, good)
        return graph, graph.outputs

    monkeypatch.setattr(timing, "_capture", capture)
    monkeypatch.setattr(timing, "_time", lambda *_: timing.Timing(1.0, 1.0, 1.0, 1))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    system = ours(draw_operands(STATIC, 2, "cpu"))[1][1]()
    with pytest.raises(WrongResultError, match=said) if said else nullcontext():
        assert timing.measure(system, 2)[0].record["us"] == 1.0


def test_the_traffic_kernel_runs_and_the_floor_counts_its_bytes() -> None:
    r = draw_operands(STATIC, 2, "cpu")
    assert play(ours(r)[1][3]()) == {"o": 0.0}
    # state, rows, gates, outputs, stored rows and gates of 2 requests with 12 nodes
    channels = 2 * 16 + 2 * 16
    want = 2 * 2 * 16 * 16 * 4 + 24 * (2 * channels + 8 + 2 * channels + 16 + 2 * 2 * 16)
    assert floor_bytes(r, convolved=False) == want
    assert floor_bytes(r, convolved=True) == want - 24 * 2 * 16

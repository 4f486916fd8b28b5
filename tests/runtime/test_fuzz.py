"""Every public call with spoiled arguments: an error that names one, or the right answer."""
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bolegen_runtime import GraphPool, LayerWeights
from support.rounds import same_bits
from support.scene_parts import module, operands
from support.scenes import SCENES
from support.spoils import Arguments, Scene, attack, spoiled

PAIRS = 40
# of what runs kernels when it is taken: the interpreter takes a minute for all of it
MOST = {"checked verify": 20, "verify": 60, "verify_qkv": 60, "Round.verify": 40,
        "Round.verify_qkv": 40}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_spoiled_arguments_are_named_or_give_the_right_answer(name: str) -> None:
    make = partial(SCENES[name], "cpu")
    assert any([attack(make, how) for how in spoiled(make(), PAIRS, MOST.get(name))])


@pytest.mark.parametrize("call", [lambda x: x + 1, lambda x: x])
def test_a_finding_says_what_was_spoiled(call: Callable[[Any], Any]) -> None:
    def make() -> Scene:
        return Scene(call, {"x": 1})

    with pytest.raises(AssertionError, match=r"\[\('x', 'words'\)\]: \w+Error: "):
        attack(make, [("x", "words")])


POOL = ["weights", "state", "conv_state", "batches", "conv_weight", "A_log", "dt_bias"]
VALUES = [None, 3, (), [None], "x", (0,), torch.zeros(2), torch.zeros(1, 2, 3, 4, 5)]


@pytest.mark.parametrize("name", POOL)
@pytest.mark.parametrize("at", range(len(VALUES)))
def test_a_pool_of_anything_else_is_refused_before_it_verifies(name: str, at: int) -> None:
    r, value = operands("cpu"), VALUES[at]
    of = {"conv_weight": r.conv_weight[0], "A_log": r.A_log[0], "dt_bias": r.dt_bias[0]}
    known: Arguments = {"state": r.state, "conv_state": r.conv_state, "batches": (1,)}
    if name in of:
        of[name] = value  # type: ignore[assignment]
    known["weights"] = [LayerWeights(**of)]
    if name in known:
        known[name] = value
    before = r.state.clone()
    with pytest.raises(ValueError, match=r"^\w+: expected"):
        GraphPool(module(), **known).find_graph(1).prewarm()
    assert same_bits(r.state, before)


@pytest.mark.parametrize("slots", [None, 3, torch.zeros(1, 2).long(), torch.zeros(2)])
def test_a_pool_asks_for_slots_before_it_looks_for_a_graph(slots: Any) -> None:
    r = operands("cpu")
    weights = [LayerWeights(r.conv_weight[0], r.A_log[0], r.dt_bias[0])]
    pool = GraphPool(module(), weights, r.state, r.conv_state, batches=(2,))
    pool.find_graph(2)._graph = SimpleNamespace(replay=lambda: None)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="slots: expected"):
        pool.verify(r.x, r.a, r.b, slots, parents=r.parents)

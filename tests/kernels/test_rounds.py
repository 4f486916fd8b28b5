"""Many rounds on the same slots: nothing drifts, nothing is left behind."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from bolegen.ir import MIXERS, DType
from support.drift import History, play_rounds
from support.judge import LIMIT, Worst
from support.rounds import build, make_round, play


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "state_dtype", "layout"),
    [(128, DType.FP32, "replay"), (128, DType.BF16, "pku")],
)
def test_many_rounds_do_not_drift(rounds: int, state_dtype: DType, layout: str) -> None:
    m = build("chain:1", value_heads=1, state_dtype=state_dtype, factors=layout)
    play_rounds(m, rounds, write=1.0).assert_within()


@pytest.mark.parametrize(
    ("mixer", "layout"), list(zip(list(MIXERS)[1:], cycle(["replay", "pku"]), strict=False))
)
def test_every_mixer_goes_on_from_what_it_committed(mixer: str, layout: str) -> None:
    m = build("(2,1)", value_heads=1, factors=layout, mixer=mixer)
    play_rounds(m, 5, write=0.3).assert_within()


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_root_alone_is_a_tree(mixer: str, layout: str) -> None:
    m = build("chain:0", factors=layout, mixer=mixer)
    play(m, make_round(m, batch=2), [0, 0]).assert_within()


@pytest.mark.parametrize("layout", ["replay", "pku"])
def test_gates_are_never_rounded_to_the_activations(layout: str) -> None:
    # beta and g of float32 grade differ from their bf16 values in nearly every token
    m = build("chain:7", value_heads=1, factors=layout)
    play_rounds(m, 6, write=0.3).assert_within()


@pytest.mark.parametrize(
    ("mixer", "layout"),
    [("gdn", "replay"), ("gdn", "pku"), ("mamba2", "replay"), ("lightning", "pku")],
)
def test_a_chain_commits_the_same_as_a_tree_or_one_node_at_a_time(mixer: str, layout: str) -> None:
    chain = build("chain:4", value_heads=1, factors=layout, mixer=mixer)
    tree = build("any:9", depth=5, value_heads=1, factors=layout, mixer=mixer)
    single = build("chain:0", value_heads=1, factors=layout, mixer=mixer)
    r = make_round(chain, batch=1)
    slot, states = int(r.slots[0]), []
    for m, parents in ((chain, None), (tree, torch.tensor([[-1, 0, 1, 2, 3, 0, 1]]))):
        one = r.with_clones(parents=parents)
        if parents is not None:
            for name in ("x", "a", "b"):
                tensor = getattr(r, name)
                setattr(one, name, torch.cat([tensor, tensor[:, :, 1:3]], dim=2))
        factors = m.allocate(1, 1, "cpu")
        one.verify(m, factors)
        one.commit(m, factors, [4])
        states.append(one)
    alone = r.with_clones()
    factors = single.allocate(1, 1, "cpu")
    for node in range(5):
        part = {name: getattr(r, name)[:, :, node : node + 1] for name in ("x", "a", "b")}
        step = replace(alone, **part)
        step.verify(single, factors)
        step.commit(single, factors, [0])
    states.append(alone)
    for other in states[1:]:
        assert torch.equal(other.conv_state, states[0].conv_state)
        gap = torch.linalg.norm(other.state[0, slot] - states[0].state[0, slot])
        assert gap <= 2 * LIMIT * torch.linalg.norm(states[0].state[0, slot])


def test_rounds_of_different_modules_on_one_pool() -> None:
    # many accepted, then no drafts, then the root alone, then no drafts again
    steps: list[tuple[str, list[int], int]] = [
        ("chain:3", [-1, 0, 1, 2], 2),
        ("chain:0", [-1], 0),
        ("parents:[-1,0,0,1,2]", [-1, 0, 0, 1, 2], 0),
        ("chain:0", [-1], 0),
        ("any:9", [-1, 0, 0, 1, 2], -1),
        ("any:9", [-1, 0, 1, 0, 3, 4], 5),
    ]
    pool = make_round(build("chain:0"), batch=2, slots=5)
    slots = [int(slot) for slot in pool.slots]
    histories = [History(build("chain:0"), pool, slot) for slot in slots]
    for number, (template, parents, last) in enumerate(steps):
        m = build(template, depth=4, factors="pku" if number % 2 else "replay")
        r = make_round(m, trees=[parents] * 2, seed=number)
        shared = ("state", "conv_state", "slots", "conv_weight", "A_log", "dt_bias")
        r = replace(r, **{name: getattr(pool, name) for name in shared})
        factors = m.allocate(2, 1, "cpu")
        r.verify(m, factors)
        r.commit(m, factors, [last, 0])
        worst = Worst()
        for row, accepted in enumerate((last, 0)):
            histories[row].accept(m, r, factors, row, accepted)
            histories[row].judge(r, slots[row], worst)
        worst.assert_within()

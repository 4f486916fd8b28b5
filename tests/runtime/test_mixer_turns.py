"""Rounds, buffers and graphs of mixers other than gdn: what a mixer does not have is None."""

from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen.ir import find_mixer
from bolegen_runtime import CanonicalState, LayerWeights, Round, RoundBuffers, VerifyGraph
from support.judge import check_commit, check_verify
from support.rounds import Round as Operands
from support.rounds import build, make_round, same_bits

LAYERS, ROWS = 2, 2
TREES = [[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 2, 2, 0]]
LAST = [5, 3]


@pytest.fixture(params=["deltanet", "kda", "mamba2", "lightning"], scope="module")
def m(request: pytest.FixtureRequest) -> ModuleType:
    return build("any:6", depth=3, mixer=request.param, value_heads=1)


def weights_of(m: ModuleType, r: Operands) -> list[LayerWeights]:
    mixer = find_mixer(m.MODULE.mixer)
    made = []
    for layer in range(LAYERS):
        _, _, A_log, dt_bias = r.gates(m, layer)
        taps = r.conv_weight[layer] if mixer.convolved else None
        skip = None if r.D is None else r.D[layer]
        made.append(LayerWeights(taps, A_log, dt_bias, D=skip))
    return made


def pools_of(m: ModuleType, r: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    return r.state, r.conv_state if find_mixer(m.MODULE.mixer).convolved else None


def judge(m: ModuleType, r: Operands, before: Operands, outs: list[Any], factors: Any) -> None:
    # scratch is one layer's, so only the last layer's rows can be judged from it
    layer = LAYERS - 1
    check_verify(m, before, outs[layer], factors, layer).assert_within()
    pools = (before.state, before.conv_state), (r.state, r.conv_state)
    check_commit(m, before, factors, *pools, LAST, layer).assert_within()


def test_a_round_verifies_and_commits(m: ModuleType) -> None:
    r = make_round(m, layers=LAYERS, trees=TREES)
    before, weights = r.with_clones(), weights_of(m, r)
    turn = Round(m, CanonicalState(*pools_of(m, r)), batch=ROWS)
    turn.begin(r.slots)
    outs = []
    for layer in range(LAYERS):
        a, b, *_ = r.gates(m, layer)
        given = r.x[layer], a, b, weights[layer], r.slots
        outs.append(turn.verify(layer, *given, parents=r.parents))
    turn.commit(r.slots, torch.tensor(LAST))
    judge(m, r, before, outs, turn.allocated)


def test_a_folded_round_ends_as_one_of_two_steps(m: ModuleType) -> None:
    ends = []
    for folded in (False, True):
        r = make_round(m, layers=LAYERS, trees=TREES)
        turn = Round(m, CanonicalState(*pools_of(m, r)), batch=ROWS, folded=folded)
        for _ in range(2):
            turn.begin(r.slots)
            for layer, weights in enumerate(weights_of(m, r)):
                a, b, *_ = r.gates(m, layer)
                out = turn.verify(layer, r.x[layer], a, b, weights, r.slots, parents=r.parents)
            turn.commit(r.slots, torch.tensor(LAST))
        if folded:
            turn.flush(r.slots)
        ends.append((out, r.state, r.conv_state))
    assert all(same_bits(one, other) for one, other in zip(*ends, strict=True))


def test_buffers_and_what_a_graph_launches(m: ModuleType) -> None:
    r = make_round(m, layers=LAYERS, trees=TREES)
    before = r.with_clones()
    buffers = RoundBuffers.allocate(m, 3, LAYERS, torch.device("cpu"))
    graph = VerifyGraph(m, weights_of(m, r), *pools_of(m, r), buffers, batch=3)
    known = find_mixer(m.MODULE.mixer).arguments
    a, b = (getattr(r, name) if name in known else None for name in "ab")
    buffers.fill(r.x, a, b, r.slots, parents=r.parents)
    graph.launch()
    buffers.fill_last(torch.tensor(LAST), ROWS)
    graph.commit()
    outs = list(buffers.out[:, :ROWS])
    assert torch.count_nonzero(buffers.out[:, ROWS:]) == 0
    judge(m, r, before, outs, buffers.factors)


def test_an_operand_that_the_mixer_does_not_have_is_refused(m: ModuleType) -> None:
    r = make_round(m, layers=LAYERS, trees=TREES)
    buffers = RoundBuffers.allocate(m, ROWS, LAYERS, torch.device("cpu"))
    before = buffers.x.clone()
    known = find_mixer(m.MODULE.mixer).arguments
    for name in {"a", "b"} - set(known):
        a, b = (getattr(r, each) if each in (*known, name) else None for each in "ab")
        with pytest.raises(ValueError, match=f"{name}: expected None"):
            buffers.fill(r.x, a, b, r.slots, parents=r.parents)
    assert same_bits(buffers.x, before)

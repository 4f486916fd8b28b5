"""What a round may not do: share factors, commit other rows, mix calls; and what checks notice."""

from types import ModuleType

import pytest
import torch

from bolegen_runtime import (
    CanonicalState,
    LayerWeights,
    LifetimeError,
    Metrics,
    Round,
    RoundBuffers,
    SlotClaims,
    expose_metrics,
    plan_nodes,
)
from bolegen_runtime.budget import planner
from bolegen_runtime.lifetimes import sum_bits
from support.rounds import Round as Data
from support.rounds import build, make_round, split

LAYERS, SLOTS = 2, 6


@pytest.fixture(scope="module")
def m() -> ModuleType:
    return build("chain:2", value_heads=1)


def draw(m: ModuleType, slots: list[int]) -> Data:
    r = make_round(m, batch=len(slots), layers=LAYERS, slots=SLOTS)
    r.slots = torch.tensor(slots)
    return r


def verify(turn: Round, r: Data, layer: int) -> torch.Tensor:
    weights = LayerWeights(r.conv_weight[layer], r.A_log[layer], r.dt_bias[layer])
    return turn.verify(layer, r.x[layer], r.a[layer], r.b[layer], weights, r.slots)


def test_two_rounds_may_not_hold_the_same_factors(m: ModuleType) -> None:
    one, other = draw(m, [0, 1]), draw(m, [2, 3])
    pools, claims = CanonicalState(one.state, one.conv_state), SlotClaims()
    factors = m.allocate(2, LAYERS, "cpu")
    first = Round(m, pools, factors=factors, claims=claims)
    second = Round(m, pools, factors=factors, claims=claims)
    first.begin(one.slots)
    with pytest.raises(LifetimeError, match="these factors hold another round"):
        second.begin(other.slots)
    first.discard()
    second.begin(other.slots)


def test_a_round_commits_the_rows_that_it_verified(m: ModuleType) -> None:
    r = draw(m, [0, 1])
    turn = Round(m, CanonicalState(r.state, r.conv_state), batch=4)
    turn.begin(r.slots)
    for layer in range(LAYERS):
        verify(turn, r, layer)
    before = r.state.clone()
    with pytest.raises(LifetimeError, match="2 rows were verified, now 4"):
        turn.commit(torch.tensor([0, 1, 2, 3]), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(r.state, before)
    turn.commit(r.slots, torch.tensor([2, 1]))
    assert not torch.equal(r.state, before)


def test_the_layers_of_a_round_go_one_way(m: ModuleType) -> None:
    r = draw(m, [0, 1])
    turn = Round(m, CanonicalState(r.state, r.conv_state), batch=2)
    turn.begin(r.slots)
    q, k, v = split(m, r.x[0])
    gates = r.a[0], r.b[0], r.A_log[0], r.dt_bias[0]
    turn.verify_qkv(0, q, k, v, *gates, r.slots)
    with pytest.raises(LifetimeError, match="other layers of this round went through verify_qkv"):
        verify(turn, r, 1)


def test_a_round_looks_at_its_tree_whatever_a_capture_left(m: ModuleType) -> None:
    r = draw(m, [0, 1])
    turn = Round(m, CanonicalState(r.state, r.conv_state), batch=2)
    turn.allocated.traced = True
    turn.begin(r.slots)
    verify(turn, r, 0)
    assert not turn.allocated.traced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_bits_tells_places_apart(dtype: torch.dtype) -> None:
    held = torch.randn(3, 4, 5).to(dtype)
    assert sum_bits(held) == sum_bits(held.clone())
    assert sum_bits(held) != sum_bits(held.flip(0))
    assert sum_bits(held) != sum_bits(held.flip(2))
    assert sum_bits(held) != sum_bits(-held)


def test_commit_refuses_a_track_into_another_row_s_slot(m: ModuleType) -> None:
    r = draw(m, [0, 1])
    factors = m.allocate(2, LAYERS, "cpu")
    for layer in range(LAYERS):
        r.verify(m, factors, layer)
    last, node = torch.tensor([2, 2]), torch.tensor([1, 1])
    for tracks in ([1, -1], [4, 4]):
        with pytest.raises(ValueError, match=r"track_slots: slot \d of row \d is another row's"):
            m.commit(
                factors, r.state, r.conv_state, r.slots, last,
                track_slots=torch.tensor(tracks), track_node=node,
            )  # fmt: skip


def test_a_static_tree_stays_where_graphs_know_it() -> None:
    scores = torch.zeros(1, 3)
    kept = planner._keep((-1, 0, 1), scores.device).data_ptr()
    for count in range(4, 200):
        plan_nodes(torch.zeros(1, count), tuple(range(-1, count - 1)), 2)
    assert planner._keep((-1, 0, 1), scores.device).data_ptr() == kept


def test_numbers_beyond_all_nodes_are_all_and_links_beyond_them_none() -> None:
    scores = torch.tensor([[0.0, -1.0, -2.0]])
    assert plan_nodes(scores, (-1, 0, 1), 10**30, maximum=10**30).all()
    assert plan_nodes(scores, (-1, 0, 1 << 40), 3).tolist() == [[True, True, False]]


def test_fill_refuses_another_part_of_its_own_buffers(m: ModuleType) -> None:
    buffers = RoundBuffers.allocate(m, 4, LAYERS, torch.device("cpu"))
    assert buffers.a is not None
    assert buffers.b is not None
    x, a, b = buffers.x[:, 1:3], buffers.a[:, :2], buffers.b[:, :2]
    before = buffers.slots.clone()
    with pytest.raises(ValueError, match="x: expected its own place in the buffers"):
        buffers.fill(x, a, b, torch.tensor([0, 1]))
    assert torch.equal(buffers.slots, before)
    buffers.fill(buffers.x[:, :2], a, b, torch.tensor([0, 1]))


def test_figures_of_one_module_and_device_are_told_once(m: ModuleType) -> None:
    with pytest.raises(ValueError, match="one for each module and device"):
        expose_metrics(Metrics(m, "cpu"), Metrics(m, "cpu"))


def test_a_count_refuses_what_its_kernel_would_misread(m: ModuleType) -> None:
    r = draw(m, [0, 1])
    factors = m.allocate(2, LAYERS, "cpu")
    r.verify(m, factors, 0)
    metrics, last = Metrics(m, "cpu"), torch.tensor([2, 1])
    with pytest.raises(ValueError, match="slots: expected a last stride of 1"):
        metrics.count_round(factors, torch.tensor([0, 9, 1, 9])[::2], last)
    with pytest.raises(ValueError, match="last_node: expected torch"):
        metrics.count_round(factors, r.slots, last.float())
    with pytest.raises(ValueError, match="nodes: expected a whole number from 1 to 3, got -5"):
        metrics.count_round(factors, r.slots, last, nodes=-5)
    with pytest.raises(ValueError, match="factors: expected those of"):
        metrics.count_round(build("chain:5", value_heads=1).allocate(2, 1, "cpu"), r.slots, last)
    with pytest.raises(ValueError, match="reason: expected words"):
        metrics.count_fallback(3)  # type: ignore[arg-type]

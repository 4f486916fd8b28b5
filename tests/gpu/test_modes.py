"""On the device: checked mode, metrics inside a graph and without a wait, dump and replay."""
# mypy: disable-error-code="no-untyped-call"

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import (
    CheckedError,
    CheckedModule,
    LayerWeights,
    Metrics,
    Settings,
    capture_round,
    load,
    load_round,
    save_round,
)
from bolegen_runtime.replay import replay_round
from support.rounds import Round, make_round

pytestmark = pytest.mark.gpu

LAYERS, DEVICE = 3, "cuda"
SHAPES: list[dict[str, Any]] = [
    {"template": "(3,3,3)"},
    {"template": "(3,3,3)", "factors": "pku", "state_dtype": "bf16"},
    {"template": "any:24", "depth": 8},
]
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 9]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))


def draw(shape: dict[str, Any], rows: int = 4) -> tuple[ModuleType, Round, torch.Tensor]:
    """A module, a round with a padded row and dead nodes, and the nodes that it accepts."""
    m = load(**shape, settings=Settings())
    trees = [TREE] * rows if m.MODULE.parents is None else None
    r = make_round(m, batch=rows, layers=LAYERS, slots=9, device=DEVICE, trees=trees)
    r.slots[1] = -1
    r.live = torch.ones(r.x.shape[1:3], dtype=torch.bool, device=DEVICE)
    r.live[2, 4:] = False
    return m, r, torch.tensor([10, 3, 3, 0], device=DEVICE)[:rows]


def verify(m: ModuleType, r: Round, factors: Any) -> torch.Tensor:
    return torch.stack([r.verify(m, factors, layer) for layer in range(LAYERS)])


@by_shape
def test_checked_rounds_pass_and_a_planted_fault_does_not(shape: dict[str, Any]) -> None:
    plain, r, last = draw(shape)
    m = CheckedModule(plain)
    factors = m.allocate(4, LAYERS, DEVICE)
    for _ in range(3):  # each from what the one before committed
        verify(m, r, factors)
        m.commit(factors, r.state, r.conv_state, r.slots, last)
    verify(m, r, factors)
    factors.rows[1, 0, -1 - len(r.trees[0]) :].neg_()
    factors.gates[1, 0].mul_(0.5)
    with pytest.raises(CheckedError, match="layer 1, request 0"):
        m.commit(factors, r.state, r.conv_state, r.slots, last)


def test_checked_mode_refuses_to_be_captured() -> None:
    plain, r, _ = draw(SHAPES[0])
    m = CheckedModule(plain)
    factors = m.allocate(4, LAYERS, DEVICE)
    r.verify(m, factors)
    torch.cuda.synchronize()
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(CheckedError, match="a capture cannot"), graph:
        r.verify(m, factors)


@by_shape
def test_a_count_is_captured_waits_for_nothing_and_allocates_nothing(
    shape: dict[str, Any],
) -> None:
    m, r, last = draw(shape)
    factors = m.allocate(4, LAYERS, DEVICE)
    verify(m, r, factors)
    m.commit(factors, r.state, r.conv_state, r.slots, last)
    factors.check = False  # checks of contents wait
    metrics = Metrics(m, DEVICE)
    nodes = r.x.shape[2]
    metrics.count_round(factors, r.slots, last, nodes=nodes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics.count_round(factors, r.slots, last, nodes=nodes)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            graph.replay()
        metrics.count_round(factors, r.slots, last, nodes=nodes)
        with metrics.time("commit"):
            m.commit(factors, r.state, r.conv_state, r.slots, last)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    seen = metrics.snapshot()
    rounds = 7
    assert seen["bolegen_rounds_total"] == rounds
    assert seen["bolegen_requests_total"] == 3 * rounds
    assert seen["bolegen_offered_nodes_total"] == 3 * nodes * rounds
    assert seen["bolegen_live_nodes_total"] == (2 * nodes + 4) * rounds
    depths = [depth_of(r.trees[row], node) for row, node in ((0, 10), (2, 3), (3, 0))]
    accepted = seen["bolegen_accepted_length_nodes"]
    assert accepted["sum"] == (sum(depths) + 3) * rounds
    assert accepted["count"] == 3 * rounds
    assert seen["bolegen_commit_seconds"]["count"] == 1
    assert 0 < seen["bolegen_commit_seconds"]["sum"] < 1


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


@by_shape
def test_a_dumped_round_replays_bit_for_bit(shape: dict[str, Any], tmp_path: Path) -> None:
    m, r, last = draw(shape)
    factors = m.allocate(4, LAYERS, DEVICE)
    out = verify(m, r, factors)
    weights = [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)]
    dump = capture_round(
        m, weights, r.state, r.conv_state, r.x, r.a, r.b, r.slots, out,
        parents=r.parents, live=r.live,
    )  # fmt: skip
    m.commit(factors, r.state, r.conv_state, r.slots, last)
    save_round(dump.with_commit(last, r.state, r.conv_state), tmp_path / "round.pt")
    found = replay_round(load_round(tmp_path / "round.pt"), m, torch.device(DEVICE))
    assert {each.what for each in found} == {"rows", "out", "state", "window"}
    assert all(not each.differ for each in found)
    worst = max(found, key=lambda each: each.ratio)
    print(f"worst {worst.what} {worst.ratio:.3f}")
    assert worst.ratio <= 1

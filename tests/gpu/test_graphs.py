"""A captured round is bit-equal to an eager one, whatever is in it, and allocates nothing."""
# mypy: disable-error-code="no-untyped-call"

from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import GraphError, GraphPool, LayerWeights, Settings, load
from support.rounds import Round, make_round

pytestmark = pytest.mark.gpu

LAYERS, SLOTS, BATCHES = 3, 12, (1, 4, 8)
SHAPES: list[dict[str, Any]] = [
    {"template": "(3,3,3)"},
    {"template": "(3,3,3)", "factors": "pku", "dtype": "fp16"},
    {"template": "any:24", "depth": 8},
    # one row of gates has 20 bytes: layers differ in the alignment of their pointers
    {"template": "(2,1)", "heads": (1, 2), "dims": (32, 16), "conv": 3},
]


@pytest.fixture(
    scope="module", params=SHAPES, ids=lambda shape: "-".join(map(str, shape.values()))
)
def captured(request: pytest.FixtureRequest) -> tuple[ModuleType, Round, GraphPool]:
    """A module, the weights and pools of its layers in a round, and its graphs."""
    m = load(**request.param, settings=Settings())
    r = draw(m, seed=0, rows=8)
    weights = [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)]
    pool = GraphPool(m, weights, r.state, r.conv_state, batches=BATCHES)
    pool.capture()
    return m, r, pool


def draw_tree(gen: torch.Generator, nodes: int, depth: int) -> list[int]:
    parents, levels = [-1], [0]
    while len(parents) < nodes:
        parent = int(torch.randint(len(parents), (1,), generator=gen))
        if levels[parent] < depth:
            parents.append(parent)
            levels.append(levels[parent] + 1)
    return parents


def draw(m: ModuleType, *, seed: int, rows: int) -> Round:
    """Random contents: data, trees, slots with a padded row, and nodes that are live."""
    gen = torch.Generator().manual_seed(seed)
    static = m.MODULE.parents is not None
    trees = [draw_tree(gen, m.MODULE.nodes, m.MODULE.depth) for _ in range(rows)]
    r = make_round(
        m, batch=rows, layers=LAYERS, slots=SLOTS, seed=seed, device="cuda",
        trees=None if static else trees,
    )  # fmt: skip
    if rows > 2:
        r.slots[1] = -1
    live = torch.rand(rows, m.MODULE.nodes, generator=gen) < 0.8
    for row, tree in enumerate(r.trees):
        live[row, 0] = True
        for node, parent in enumerate(tree[1:], 1):
            live[row, node] &= live[row, parent]
    r.live = live.cuda()
    return r


def share(r: Round, owner: Round) -> Round:
    """The same contents over the weights and the pools that were captured."""
    for name in ("conv_weight", "A_log", "dt_bias", "state", "conv_state"):
        setattr(r, name, getattr(owner, name))
    return r


def verify(pool: GraphPool, r: Round) -> torch.Tensor:
    return pool.verify(r.x, r.a, r.b, r.slots, parents=r.parents, live=r.live)


@pytest.mark.parametrize(("seed", "rows"), [(1, 8), (2, 3), (3, 1), (4, 5)])
def test_a_replay_with_new_contents_is_bit_equal_to_eager(
    captured: tuple[ModuleType, Round, GraphPool], seed: int, rows: int
) -> None:
    m, owner, pool = captured
    r = share(draw(m, seed=seed, rows=rows), owner)
    owner.state.normal_(0, 0.3)  # the pools change between rounds as well
    out = verify(pool, r).clone()
    factors = m.allocate(rows, LAYERS, "cuda")
    want = torch.stack([r.verify(m, factors, layer) for layer in range(LAYERS)])
    assert torch.isfinite(want).all()
    assert torch.count_nonzero(want)
    assert torch.equal(out, want)
    # and so is what commit makes of it
    last = torch.randint(
        -1, m.MODULE.nodes, (rows,), generator=torch.Generator().manual_seed(seed)
    )
    state, window = owner.state.clone(), owner.conv_state.clone()
    m.commit(factors, state, window, r.slots, last.cuda())
    pool.commit(last.cuda())
    assert torch.equal(owner.state, state)
    assert torch.equal(owner.conv_state, window)


def test_a_round_allocates_nothing(captured: tuple[ModuleType, Round, GraphPool]) -> None:
    m, owner, pool = captured
    r = share(draw(m, seed=5, rows=3), owner)
    last = torch.zeros(3, dtype=torch.int32, device="cuda")

    def count() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = count()
    for _ in range(3):
        verify(pool, r)
        pool.commit(last)
    assert count() == before


def test_a_replay_repeats_bit_for_bit(captured: tuple[ModuleType, Round, GraphPool]) -> None:
    m, owner, pool = captured
    r = share(draw(m, seed=6, rows=8), owner)
    first = verify(pool, r).clone()
    for _ in range(20):
        assert torch.equal(verify(pool, r), first)


def test_a_batch_that_no_graph_holds_is_refused(
    captured: tuple[ModuleType, Round, GraphPool],
) -> None:
    m, owner, pool = captured
    r = share(draw(m, seed=7, rows=9), owner)
    with pytest.raises(GraphError, match="no graph holds 9 rows; this pool has batches 1, 4, 8"):
        verify(pool, r)

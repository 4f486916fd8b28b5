"""A captured round is bit-equal to an eager one, whatever is in it, and allocates nothing."""
# mypy: disable-error-code="no-untyped-call"

import random
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import (
    CanonicalState,
    GraphError,
    GraphPool,
    LayerWeights,
    LifetimeError,
    Settings,
    load,
    trace_links,
    trace_parents,
)
from bolegen_runtime import Round as CallRound
from support.quiet import Noise, listen
from support.rounds import Round, make_round
from support.trees import draw_tree
from support.trees import links_of as row_links

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


def draw(m: ModuleType, *, seed: int, rows: int) -> Round:
    """Random contents: data, trees, slots with a padded row, and nodes that are live."""
    gen = torch.Generator().manual_seed(seed)
    static = m.MODULE.parents is not None
    numbers = random.Random(seed)
    trees = [draw_tree(numbers, m.MODULE.nodes, m.MODULE.depth) for _ in range(rows)]
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


def test_a_round_allocates_compiles_and_waits_for_nothing(
    captured: tuple[ModuleType, Round, GraphPool],
) -> None:
    m, owner, pool = captured
    static = m.MODULE.parents is not None
    noise, last = Noise(), torch.zeros(4, dtype=torch.int32, device="cuda")
    for seed in range(6):
        rows = 1 + seed % 4
        r = share(draw(m, seed=seed, rows=rows), owner)
        given: dict[str, Any] = {"counts": torch.tensor([3, 1, 0, 9][:rows], device="cuda")}
        if not static and seed % 2:
            kind = torch.int32 if seed % 3 else torch.int64
            given["links"] = links_of(r.trees, kind)
        elif not static:
            # a view whose address is no multiple of 16 bytes
            wide = torch.zeros(rows, m.MODULE.nodes + 1, dtype=torch.int32, device="cuda")
            given["parents"] = wide[:, 1:].copy_(torch.tensor(r.trees))
        if seed > 2:
            given["live"] = r.live
        with listen(noise):
            pool.verify(r.x, r.a, r.b, r.slots, **given)
            pool.commit(last[:rows])
    assert noise == Noise()


def test_whoever_listens_hears_an_allocation_a_compilation_and_a_wait() -> None:
    noise, tree = Noise(), torch.zeros(1, 300, dtype=torch.int32, device="cuda")
    live, slots = torch.ones_like(tree, dtype=torch.bool), torch.zeros(1, device="cuda").long()
    with listen(noise):
        trace_parents(tree, slots, tree, live)
        torch.zeros(3, device="cuda")
    assert noise == Noise(allocations=1, compilations=1)
    with pytest.raises(RuntimeError), listen(noise):
        tree.sum().item()


def links_of(trees: list[list[int]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    pairs = zip(*map(row_links, trees), strict=True)
    return tuple(torch.tensor(x, dtype=dtype, device="cuda") for x in pairs)


@pytest.mark.parametrize("captured", [SHAPES[2]], indirect=True, ids=["any"])
def test_links_of_other_trees_replay_as_their_parents(
    captured: tuple[ModuleType, Round, GraphPool],
) -> None:
    m, owner, pool = captured
    for seed in range(4):
        r = share(draw(m, seed=seed, rows=5), owner)
        want = verify(pool, r).clone()
        kind = torch.int64 if seed % 2 else torch.int32
        links = links_of(r.trees, kind)
        out = pool.verify(r.x, r.a, r.b, r.slots, links=(links[0], links[1]), live=r.live)
        assert torch.equal(out, want)


@pytest.mark.parametrize("captured", [SHAPES[2]], indirect=True, ids=["any"])
def test_an_engines_own_capture_holds_links_and_all_layers(
    captured: tuple[ModuleType, Round, GraphPool],
) -> None:
    m, owner, _ = captured
    rows, nodes = 3, m.MODULE.nodes
    at = share(draw(m, seed=0, rows=rows), owner)
    first, sibling = links_of(at.trees, torch.int32)
    parents = torch.zeros(rows, nodes, dtype=torch.int32, device="cuda")
    live = torch.zeros(rows, nodes, dtype=torch.bool, device="cuda")
    out = torch.zeros(*at.a.shape, m.MODULE.dims[1], dtype=at.x.dtype, device="cuda")
    round_ = CallRound(m, CanonicalState(owner.state, owner.conv_state), batch=rows)

    def run() -> None:
        trace_links(first, sibling, at.slots, parents, live)
        for layer in range(LAYERS):
            weights = LayerWeights(at.conv_weight[layer], at.A_log[layer], at.dt_bias[layer])
            round_.verify(
                layer, at.x[layer], at.a[layer], at.b[layer], weights, at.slots,
                parents=parents, live=live, out=out[layer],
            )  # fmt: skip

    round_.begin(at.slots)
    run()
    round_.discard()
    round_.allocated.check = False
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    last = torch.zeros(rows, dtype=torch.int64, device="cuda")
    # nothing ran while it was captured
    with pytest.raises(LifetimeError, match="no round to commit"):
        round_.commit(at.slots, last)
    for seed in (1, 2):
        r = share(draw(m, seed=seed, rows=rows), owner)
        r.live = None
        for place, new in zip(
            (at.x, at.a, at.b, at.slots, first, sibling),
            (r.x, r.a, r.b, r.slots, *links_of(r.trees, torch.int32)),
            strict=True,
        ):
            place.copy_(new)
        factors = m.allocate(rows, LAYERS, "cuda")
        want = torch.stack([r.verify(m, factors, layer) for layer in range(LAYERS)])
        state, window = owner.state.clone(), owner.conv_state.clone()
        m.commit(factors, state, window, r.slots, last)
        round_.begin(at.slots)
        round_.replay(graph)
        assert torch.equal(out, want)
        round_.commit(at.slots, last)
        assert torch.equal(owner.state, state)
        assert torch.equal(owner.conv_state, window)


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

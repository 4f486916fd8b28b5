"""A pool of graphs pads rounds, refuses what it cannot hold, and launches what verify would."""
# mypy: disable-error-code="no-untyped-call"

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bolegen_runtime import (
    GraphError,
    GraphPool,
    LayerWeights,
    LifetimeError,
    Settings,
    SlotClaims,
    load,
)
from support.rounds import Round, make_round
from support.trees import links_of as row_links

LAYERS, SLOTS = 2, 5
ANY_TREES = [[-1, 0, 1, 1], [-1, 0, 0, 2], [-1, 0, 1, 2]]


@cache
def module(template: str = "(2,1)") -> ModuleType:
    shapes: dict[str, Any] = {"heads": (1, 1), "dims": (16, 16), "conv": 2, "dtype": "fp32"}
    return load(template, **shapes, settings=Settings())


def weights_of(r: Round) -> list[LayerWeights]:
    bias = [None] * LAYERS if r.conv_bias is None else list(r.conv_bias)
    return [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, bias, strict=True)]


def make(m: ModuleType, **options: Any) -> tuple[Round, GraphPool]:
    r = make_round(m, layers=LAYERS, slots=SLOTS, **{"batch": 3, **options})
    return r, GraphPool(m, weights_of(r), r.state, r.conv_state, batches=(4, 1))


def arguments_of(r: Round) -> dict[str, torch.Tensor | None]:
    return {
        "x": r.x, "a": r.a, "b": r.b, "slots": r.slots, "parents": r.parents, "live": r.live
    }  # fmt: skip


def launch(pool: GraphPool, **given: Any) -> torch.Tensor:
    """Pool.verify without a graph."""
    graph = pool.find_graph(len(given["slots"]))
    pool.buffers.fill(**given)
    graph.launch()
    return pool.buffers.out


def expected(m: ModuleType, r: Round) -> tuple[torch.Tensor, Any]:
    factors = m.allocate(r.x.shape[1], LAYERS, "cpu")
    return torch.stack([r.verify(m, factors, layer) for layer in range(LAYERS)]), factors


@pytest.mark.parametrize("template", ["(2,1)", "any:6"])
def test_a_padded_round_is_bit_equal_to_verify(template: str) -> None:
    m = module(template)
    r, pool = make(m, **({} if m.MODULE.parents else {"trees": ANY_TREES, "nodes": 4}))
    rows, n = r.x.shape[1:3]
    # what an earlier round left behind
    for tensor in (pool.buffers.x, pool.buffers.a, pool.buffers.b, pool.buffers.out):
        assert tensor is not None
        tensor.fill_(float("nan"))
    out = launch(pool, **arguments_of(r))
    want, _ = expected(m, r)
    assert torch.equal(out[:, :rows, :n], want)
    assert torch.count_nonzero(out[:, rows:]) == torch.count_nonzero(out[:, :, n:]) == 0


@pytest.mark.parametrize("template", ["(2,1)", "any:6"])
def test_a_round_traces_its_topology_once(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = module(template)
    r, pool = make(m, **({} if m.MODULE.parents else {"trees": ANY_TREES, "nodes": 4}))
    name = f"trace_{m.MODULE.name}"
    kernel, launched = getattr(m, name), []

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(m, name, Counted())
    launch(pool, **arguments_of(r))
    assert len(launched) == 1
    assert pool.buffers.factors.traced is False


def test_a_later_round_sees_nothing_of_an_earlier_one() -> None:
    m = module()
    r, pool = make(m)
    r.live = torch.tensor([[True, True, False, False, False]] * 3)
    launch(pool, **arguments_of(r))
    later, _ = make(m, seed=1, batch=2)
    later.state, later.conv_state = r.state, r.conv_state
    later.conv_weight, later.A_log, later.dt_bias = r.conv_weight, r.A_log, r.dt_bias
    out = launch(pool, **arguments_of(later))
    assert torch.equal(out[:, :2], expected(m, later)[0])
    assert torch.count_nonzero(out[:, 2:]) == 0


def test_a_short_round_is_the_first_nodes_of_the_tree() -> None:
    m = module()
    r, pool = make(m)
    short = {**arguments_of(r), "x": r.x[:, :, :2], "a": r.a[:, :, :2], "b": r.b[:, :, :2]}
    out = launch(pool, **short)
    r.live = torch.tensor([[True, True, False, False, False]] * 3)
    assert torch.equal(out[:, :3], expected(m, r)[0])


def test_a_round_may_be_written_into_the_buffers_themselves() -> None:
    m = module()
    r, pool = make(m)
    r.live = torch.tensor([[True, True, False, True, False]] * 3)
    at = pool.buffers
    given: dict[str, torch.Tensor] = {
        name: buffer[:, :3] if buffer.dim() > 3 else buffer[:3]
        for name, buffer in vars(at).items()
        if name in ("x", "a", "b", "slots", "live")
    }
    for name, place in given.items():
        place.copy_(getattr(r, name))
    assert torch.equal(launch(pool, **given)[:, :3], expected(m, r)[0])


def test_commit_of_a_padded_round_is_bit_equal() -> None:
    m = module()
    r, pool = make(m)
    _, factors = expected(m, r)
    state, window = r.state.clone(), r.conv_state.clone()
    last = torch.tensor([3, -1, 0])
    m.commit(factors, state, window, r.slots, last)
    launch(pool, **arguments_of(r))
    pool.buffers.fill_last(last, 3)
    pool.find_graph(3).commit()
    assert torch.equal(r.state, state)
    assert torch.equal(r.conv_state, window)


def test_prewarming_writes_nothing() -> None:
    r, pool = make(module())
    before = r.state.clone(), r.conv_state.clone()
    launch(pool, **arguments_of(r))
    pool.find_graph(3).prewarm()
    assert torch.equal(r.state, before[0])
    assert torch.equal(r.conv_state, before[1])
    assert torch.count_nonzero(pool.buffers.out) == 0


def test_the_smallest_graph_that_fits_is_taken_and_a_miss_names_them_all() -> None:
    _, pool = make(module())
    assert [pool.find_graph(rows).batch for rows in (0, 1, 2, 4)] == [1, 1, 4, 4]
    with pytest.raises(GraphError, match=r"no graph holds 5 rows; this pool has batches 1, 4\."):
        pool.find_graph(5)
    big, _ = make(module(), batch=5)
    with pytest.raises(GraphError, match="5 rows"):
        pool.verify(big.x, big.a, big.b, big.slots)


def test_nothing_runs_that_was_not_captured() -> None:
    r, pool = make(module())
    with pytest.raises(GraphError, match="batch 4 is not captured"):
        pool.verify(r.x, r.a, r.b, r.slots)
    with pytest.raises(LifetimeError, match="no round to commit"):
        pool.commit(torch.tensor([0, 0, 0]))
    with pytest.raises(GraphError, match=r"CUDA device.*on cpu"):
        pool.capture()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(3, 5, 64), "x: expected four axes"),
        ("x", torch.zeros(2, 3, 6, 48), "x: expected at most 4 rows of 1 to 5 nodes, got 3 of 6"),
        ("x", torch.zeros(1, 3, 5, 48), r"x: expected shape \(2, 3, 5, 48\)"),
        ("a", torch.zeros(2, 3, 5, 2), r"a: expected shape \(2, 3, 5, 1\), got \(2, 3, 5, 2\)"),
        ("b", torch.zeros(2, 3, 5, 1).half(), "b: expected torch.float32, got torch.float16"),
        ("slots", torch.zeros(3), "slots: expected torch.int32 or torch.int64"),
        ("live", torch.zeros(3, 5), "live: expected torch.bool"),
        ("x", torch.zeros(2, 3, 5, 48, device="meta"), "x: expected device cpu, got meta"),
        ("parents", torch.zeros(3, 5).int(), "parents: expected None, the topology is compiled"),
    ],
)
def test_a_wrong_round_is_refused_before_anything_is_copied(
    name: str, value: torch.Tensor, message: str
) -> None:
    r, pool = make(module())
    before = pool.buffers.slots.clone()
    with pytest.raises(ValueError, match=message):
        pool.buffers.fill(**{**arguments_of(r), name: value})  # type: ignore[arg-type]
    assert torch.equal(pool.buffers.slots, before)


def test_a_topology_of_run_time_must_be_given() -> None:
    r, pool = make(module("any:6"), trees=ANY_TREES, nodes=4)
    with pytest.raises(ValueError, match="parents, links: expected one of them, got neither"):
        pool.buffers.fill(r.x, r.a, r.b, r.slots)


def links_of(trees: list[list[int]]) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.tensor, zip(*map(row_links, trees), strict=True)))


def test_links_and_counts_give_what_parents_and_live_nodes_give() -> None:
    m = module("any:6")
    r, pool = make(m, trees=ANY_TREES, nodes=4)
    given: dict[str, Any] = arguments_of(r) | {"parents": None}
    links = links_of(ANY_TREES)
    out = launch(pool, **given, links=links).clone()
    assert torch.equal(out[:, :3, :4], expected(m, r)[0])
    counts = torch.tensor([1, 4, 3], dtype=torch.int32)
    narrow = tuple(link.int() for link in links)
    out = launch(pool, **given, links=narrow, counts=counts)
    r.live = torch.arange(4) < counts[:, None]
    assert torch.equal(out[:, :3, :4], expected(m, r)[0])
    # both at once, where the nodes that count are not all kept
    given["live"] = torch.tensor([[True] * 4, [True, False, True, False], [True] * 4])
    out = launch(pool, **given, links=links, counts=counts)
    r.live &= torch.tensor([[True] * 4, [True, False, True, False], [True] * 4])
    r.live[1, 3] = False
    assert torch.equal(out[:, :3, :4], expected(m, r)[0])


def test_a_static_tree_takes_counts() -> None:
    m = module()
    r, pool = make(m)
    r.live = torch.tensor([[True, True, False, True, False]] * 3)
    out = launch(pool, **arguments_of(r), counts=torch.tensor([1, 5, 3]))
    r.live = torch.tensor([[True] + [False] * 4, r.live[0].tolist(), [True, True] + [False] * 3])
    assert torch.equal(out[:, :3], expected(m, r)[0])


@pytest.mark.parametrize("kind", ["parents", "links"])
def test_garbage_in_a_tree_is_dead_and_numbers_do_not_wrap(kind: str) -> None:
    m = module("any:6")
    r, pool = make(m, trees=[[-1, 0, 1 << 32, 1]] * 3, nodes=4)
    given: dict[str, Any] = arguments_of(r) | {"parents": None}
    if kind == "parents":
        given["parents"] = r.parents
    else:
        # 1 to 3 would be 1 in 32 bits
        given["links"] = (
            torch.tensor([[1, 3, -1, -1]] * 3),
            torch.tensor([[-1, (1 << 32) + 2, -1, -1]] * 3),
        )
    r.x[:, :, 2] = float("nan")
    out = launch(pool, **given)
    r.parents = torch.tensor([[-1, 0, -1, 1]] * 3)
    r.live = torch.tensor([[True, True, False, True]] * 3)
    assert torch.equal(out[:, :3, :4], expected(m, r)[0])


def test_prewarming_a_topology_leaves_padded_rows() -> None:
    _, pool = make(module("any:6"), trees=ANY_TREES, nodes=4)
    pool.buffers.prewarm()
    assert (pool.buffers.slots == -1).all()
    assert not pool.buffers.live.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": torch.zeros(3, 4).int()}, "expected one of them, got both"),
        ({"links": None}, "expected one of them, got neither"),
        ({"links": torch.zeros(2, 3, 4).int()}, "links: expected a pair"),
        ({"links": (torch.zeros(3, 4).int(),)}, "links: expected a pair"),
        (
            {"links": (torch.zeros(3, 4).int(), torch.zeros(3, 4).long())},
            r"next_sibling: expected torch\.int32, got torch\.int64",
        ),
        (
            {"links": (torch.zeros(3, 5).int(), torch.zeros(3, 4).int())},
            r"first_child: expected shape \(3, 4\)",
        ),
        ({"counts": torch.zeros(4).int()}, r"counts: expected shape \(3,\), got \(4,\)"),
        ({"counts": torch.zeros(3)}, r"counts: expected torch\.int32 or torch\.int64"),
    ],
)
def test_a_wrong_topology_is_refused_before_anything_is_copied(
    change: dict[str, Any], message: str
) -> None:
    r, pool = make(module("any:6"), trees=ANY_TREES, nodes=4)
    given: dict[str, Any] = arguments_of(r) | {"parents": None, "links": links_of(ANY_TREES)}
    before = pool.buffers.slots.clone()
    with pytest.raises(ValueError, match=message):
        pool.buffers.fill(**given | change)
    assert torch.equal(pool.buffers.slots, before)


def test_a_round_of_the_pool_has_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    m = module()
    r = make_round(m, layers=LAYERS, slots=SLOTS, batch=3)
    claims = SlotClaims()
    pools = [
        GraphPool(m, weights_of(r), r.state, r.conv_state, batches=(4,), claims=claims)
        for _ in range(2)
    ]
    for pool in pools:
        # a graph needs a GPU; what it would replay runs at once
        graph = pool.find_graph(4)
        monkeypatch.setattr(graph, "_graph", SimpleNamespace(replay=graph.launch))
    last, (one, other) = torch.tensor([3, -1, 0]), pools
    one.verify(r.x, r.a, r.b, r.slots)
    with pytest.raises(LifetimeError, match="has uncommitted factors of another round"):
        other.verify(r.x, r.a, r.b, r.slots)
    with pytest.raises(LifetimeError, match="neither committed nor discarded"):
        one.verify(r.x, r.a, r.b, r.slots)
    want = r.with_clones()
    m.commit(expected(m, r)[1], want.state, want.conv_state, r.slots, last)
    one.commit(last)
    assert torch.equal(r.state, want.state)
    with pytest.raises(LifetimeError, match="no round to commit"):
        one.commit(last)
    # an error in a round leaves none behind
    with pytest.raises(ValueError, match="x: expected"):
        other.verify(r.x[:1], r.a, r.b, r.slots)
    with pytest.raises(LifetimeError, match="no round to commit"):
        other.commit(last)
    one.verify(r.x, r.a, r.b, r.slots)
    assert torch.equal(r.state, want.state)


def test_last_nodes_are_one_a_row() -> None:
    _, pool = make(module())
    with pytest.raises(ValueError, match=r"last_node: expected shape \(3,\), got \(2,\)"):
        pool.buffers.fill_last(torch.tensor([0, 0]), 3)


@pytest.mark.parametrize("batches", [(), (0, 2)])
def test_a_pool_needs_batches(batches: tuple[int, ...]) -> None:
    r = make_round(module(), layers=LAYERS)
    with pytest.raises(ValueError, match="batches: expected"):
        GraphPool(module(), weights_of(r), r.state, r.conv_state, batches=batches)


def test_a_pool_needs_the_weights_of_every_layer() -> None:
    r = make_round(module(), layers=LAYERS)
    with pytest.raises(ValueError, match="weights: expected one a layer, got 1, with pools of 2"):
        GraphPool(module(), weights_of(r)[:1], r.state, r.conv_state)


def test_wrong_weights_are_named_when_warming_up() -> None:
    r = make_round(module(), layers=LAYERS)
    wrong = [
        LayerWeights(w.half(), *gates)
        for w, *gates in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)
    ]
    pool = GraphPool(module(), wrong, r.state, r.conv_state, batches=(1,))
    with pytest.raises(ValueError, match=r"conv_weight: expected torch\.float32"):
        pool.find_graph(1).prewarm()

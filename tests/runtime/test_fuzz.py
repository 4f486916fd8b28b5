"""Every public call with spoiled arguments: an error that names one, or the right answer."""
# mypy: disable-error-code="no-untyped-call"

import re
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bolegen_runtime import GraphPool, LayerWeights, RoundBuffers, trace_links, trace_parents
from support.rounds import Round, build, make_round, same_bits, split

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip
ROWS, NODES, LAYERS, SLOTS = 2, 3, 1, 3
Arguments = dict[str, Any]

SPOILS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: None,
    "a number": lambda x: 3,
    "a list": lambda x: x.tolist(),
    "on meta": lambda x: x.to("meta"),
    "one axis less": lambda x: x[0] if x.dim() else x,
    "one axis more": lambda x: x[None],
    "no rows": lambda x: x[:0],
    "a row less": lambda x: x[:-1],
    "a row more": lambda x: torch.cat([x, x[:1]]),
    "no columns": lambda x: x[..., :0],
    "a column less": lambda x: x[..., :-1],
    "a column more": lambda x: torch.cat([x, x[..., :1]], -1),
    "axes swapped": lambda x: x.transpose(0, -1),
    "stored backwards": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "spaced out": lambda x: torch.stack([x, x], -1)[..., 0],
    "a column of a wider one": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "rows in one place": lambda x: x[:1].expand(x.shape),
    "columns in one place": lambda x: x[..., :1].expand(x.shape),
    "reshaped": lambda x: x.flatten(),
}
SPOILS |= {str(dtype): partial(torch.Tensor.to, dtype=dtype) for dtype in DTYPES}


@cache
def module() -> ModuleType:
    return build("any:4", depth=2, key_heads=1, value_heads=1, d_k=16, d_v=16, conv=2)


def fresh() -> Round:
    trees = [[-1, 0, 0], [-1, 0, 1]]
    r = make_round(module(), trees=trees, slots=SLOTS, layers=LAYERS, bias=True)
    r.live = torch.tensor([[True, True, True], [True, True, False]])
    return r


def arguments(name: str) -> Arguments:
    """Right arguments, the same in every call."""
    r, m = fresh(), module()
    first = torch.tensor([[1, -1, -1], [1, 2, -1]], dtype=torch.int32)
    sibling = torch.tensor([[-1, 2, -1], [-1, -1, -1]], dtype=torch.int32)
    tree = {
        "slots": r.slots, "parents": torch.zeros(ROWS, 4, dtype=torch.int32),
        "live": torch.zeros(ROWS, 4, dtype=torch.bool), "keep": r.live,
        "counts": torch.tensor([3, 2]),
    }  # fmt: skip
    if name == "trace_links":
        return {"first_child": first, "next_sibling": sibling, **tree}
    if name == "trace_parents":
        return {"given": r.parents, **tree}
    last = torch.tensor([1, 2])
    if name == "commit":
        tracks = {"track_slots": torch.tensor([-1, -1]), "track_node": torch.tensor([0, 0])}
        pools = {"state": r.state, "conv_state": r.conv_state, "slots": r.slots}
        return pools | {"last_node": last, "parents": r.parents} | tracks
    rows = {"x": r.x, "a": r.a, "b": r.b, "slots": r.slots}
    if name == "fill":
        return rows | {"live": r.live, "first_child": first, "next_sibling": sibling,
                       "counts": torch.tensor([3, 2])}  # fmt: skip
    assert r.conv_bias is not None
    gates = {"a": r.a[0], "b": r.b[0], "A_log": r.A_log[0], "dt_bias": r.dt_bias[0]}
    shared = {
        "state": r.state[0], "slots": r.slots, "parents": r.parents, "live": r.live,
        "out": torch.zeros(ROWS, NODES, 1, 16, dtype=r.x.dtype),
    }  # fmt: skip
    if name == "verify_qkv":
        return dict(zip("qkv", split(m, r.x[0]), strict=True)) | gates | shared
    weights = {"conv_weight": r.conv_weight[0], "conv_bias": r.conv_bias[0]}
    return {"x": r.x[0], **gates, **weights, "conv_state": r.conv_state[0], **shared}


def call(name: str, given: Arguments) -> list[torch.Tensor]:
    """What a call returns or writes; what it may not write is compared here."""
    m = module()
    if name in ("trace_links", "trace_parents"):
        trace: Callable[..., None] = trace_links if name == "trace_links" else trace_parents
        trace(**given)
        return [given["parents"], given["live"]]
    if name == "fill":
        buffers = RoundBuffers.allocate(m, ROWS + 1, LAYERS, torch.device("cpu"))
        links = given.pop("first_child"), given.pop("next_sibling")
        buffers.fill(**given, links=links)
        return [t for t in vars(buffers).values() if isinstance(t, torch.Tensor)]
    factors = m.allocate(ROWS, LAYERS, "cpu")
    if name == "commit":
        fresh().verify(m, factors)
        m.commit(factors, **given)
        return [t for t in (given["state"], given["conv_state"]) if t is not None]
    pools = [given[p] for p in ("state", "conv_state") if isinstance(given.get(p), torch.Tensor)]
    kept = [p.clone() for p in pools]
    out = getattr(m, name)(factors=factors, **given)
    assert all(p.is_meta or same_bits(p, k) for p, k in zip(pools, kept, strict=True))
    return [out]


def attempt(name: str, given: Arguments) -> tuple[list[torch.Tensor], str]:
    """What the call gives, and its complaint if it has one."""
    try:
        return call(name, dict(given)), ""
    except ValueError as error:
        return [], str(error)


def copied(given: Arguments) -> Arguments:
    """The same values, packed."""
    return {
        name: x.contiguous().clone() if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }


def bits(given: Arguments) -> list[torch.Tensor]:
    return [x.clone() for x in given.values() if isinstance(x, torch.Tensor) and not x.is_meta]


def spoiled(name: str) -> st.SearchStrategy[list[tuple[str, str]]]:
    """One or two of the arguments, and how they are spoiled."""
    pair = st.tuples(st.sampled_from(sorted(arguments(name))), st.sampled_from(sorted(SPOILS)))
    return st.lists(pair, min_size=1, max_size=2, unique_by=lambda of: of[0])


@pytest.mark.parametrize(
    "name", ["verify", "verify_qkv", "commit", "trace_links", "trace_parents", "fill"]
)
def test_spoiled_arguments_are_named_or_give_the_right_answer(name: str) -> None:
    known = set(arguments(name)) | {"factors", "links"}
    seen = {"refused": 0, "right": 0}

    @settings(max_examples=120, deadline=None)
    @given(spoiled(name))
    def run(how: list[tuple[str, str]]) -> None:
        given = arguments(name)
        for each, spoil in how:
            given[each] = SPOILS[spoil](given[each])
        packed, before = copied(given), bits(given)
        found, error = attempt(name, given)
        if error:
            said = re.match(r"(\w+(?:, \w+)*): ", error)
            assert said, error
            assert set(said.group(1).split(", ")) <= known, error
            assert all(map(same_bits, before, bits(given))), "a refused call wrote something"
            seen["refused"] += 1
            return
        assert all(map(same_bits, found, call(name, packed)))
        seen["right"] += 1

    run()
    assert min(seen.values()) > 0, seen


@settings(deadline=None)
@given(
    st.one_of(st.integers(-2, 3), st.floats(), st.text(max_size=2), st.none()),
    st.one_of(st.integers(-2, 3), st.floats(), st.text(max_size=2), st.none()),
    st.sampled_from(["cpu", "meta", "nowhere", None, 7.5]),
)
def test_allocate_takes_sizes_or_fails(batch: Any, layers: Any, device: Any) -> None:
    right = isinstance(batch, int) and isinstance(layers, int) and batch >= 0 and layers >= 1
    try:
        factors = module().allocate(batch, layers, device)
    except (ValueError, TypeError, RuntimeError):
        assert not (right and device in ("cpu", "meta"))
        return
    assert right
    assert (factors.batch, factors.layers) == (batch, layers)


POOL = ["weights", "state", "conv_state", "batches", "conv_weight", "A_log", "dt_bias"]
VALUES = [None, 3, (), [None], "x", (0,), torch.zeros(2), torch.zeros(1, 2, 3, 4, 5)]


@pytest.mark.parametrize("name", POOL)
@pytest.mark.parametrize("at", range(len(VALUES)))
def test_a_pool_of_anything_else_is_refused_before_it_verifies(name: str, at: int) -> None:
    r, value = fresh(), VALUES[at]
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
    r = fresh()
    weights = [LayerWeights(r.conv_weight[0], r.A_log[0], r.dt_bias[0])]
    pool = GraphPool(module(), weights, r.state, r.conv_state, batches=(2,))
    pool.find_graph(2)._graph = SimpleNamespace(replay=lambda: None)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="slots: expected"):
        pool.verify(r.x, r.a, r.b, slots, parents=r.parents)

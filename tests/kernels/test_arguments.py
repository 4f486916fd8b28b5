"""Wrong arguments: a ValueError that names the argument, before anything runs or changes."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from support.rounds import Round, build, make_round, same_bits, split

TREE = [-1, 0, 0, 1]
Change = Callable[[torch.Tensor], Any]


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half() if x.is_floating_point() else x.to(torch.int16)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same values with a last stride of 2."""
    return torch.stack([x, x], dim=-1)[..., 0]


WRONG: dict[str, Change] = {
    "no tensor": lambda x: x.tolist(),
    "none": lambda x: None,
    "one axis less": lambda x: x[0],
    "one axis more": lambda x: x[None],
    "no axes": lambda x: x.flatten()[0],
    "first axis longer": lambda x: torch.cat([x, x[:1]]),
    "last axis shorter": lambda x: x[..., :-1],
    "dtype": half,
    "double": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "strides": spaced,
}
# what an argument takes although the list above calls it wrong
ALLOWED: dict[str, set[str]] = {
    "a": {"strides"},
    "b": {"strides"},
    "live": {"strides", "none"},
    "parents": {"strides"},
    "conv_bias": {"none"},
    "out": {"none"},
    "verify state": {"first axis longer"},  # blamed on conv_state, which has fewer slots
    "verify_qkv state": {"first axis longer"},  # legal
    "commit state": {"first axis longer"},  # more layers than there is room for
    "commit conv_state": {"none"},
    "commit parents": {"none", "last axis shorter"},
}
GATES = ["a", "b", "A_log", "dt_bias"]
ROUND = [*GATES, "state", "slots", "parents", "live", "out"]
CALLS = {
    "verify": ["x", "conv_weight", "conv_bias", "conv_state", *ROUND],
    "verify_qkv": ["q", "k", "v", *ROUND],
    "commit": [
        "state",
        "conv_state",
        "slots",
        "last_node",
        "parents",
        "track_slots",
        "track_node",
    ],
}


@pytest.fixture(scope="module")
def m() -> ModuleType:
    return build("any:9", depth=3, conv=3)


@pytest.fixture
def r(m: ModuleType) -> Round:
    return make_round(m, trees=[TREE] * 2, bias=True)


@pytest.fixture(scope="module")
def verified(m: ModuleType) -> tuple[Round, Any]:
    """A round and its factors, ready for a commit; no refused call changes them."""
    r = make_round(m, trees=[TREE] * 2, bias=True)
    factors = m.allocate(2, 1, "cpu")
    r.verify(m, factors)
    return r, factors


def arguments(m: ModuleType, r: Round, name: str) -> dict[str, Any]:
    """Every tensor of one call, all of them right."""
    gates = {"a": r.a[0], "b": r.b[0], "A_log": r.A_log[0], "dt_bias": r.dt_bias[0]}
    pool = {"state": r.state[0], "slots": r.slots}
    given = {"parents": r.parents, "live": torch.ones(2, 4, dtype=torch.bool)}
    if name == "commit":
        nodes = torch.tensor([1, 2])
        track = {"track_slots": torch.tensor([-1, -1]), "track_node": torch.tensor([0, 0])}
        pools = {"state": r.state, "conv_state": r.conv_state, "slots": r.slots}
        return pools | {"last_node": nodes, "parents": r.parents} | track
    out = {"out": torch.zeros(2, 4, 2, 16, dtype=r.x.dtype)}
    if name == "verify_qkv":
        return dict(zip("qkv", split(m, r.x[0]), strict=True)) | gates | pool | given | out
    assert r.conv_bias is not None
    rows = {"x": r.x[0], "conv_weight": r.conv_weight[0], "conv_bias": r.conv_bias[0]}
    return rows | gates | pool | {"conv_state": r.conv_state[0]} | given | out


def snapshot(factors: Any, known: dict[str, Any]) -> list[torch.Tensor]:
    tensors = [t for t in vars(factors).values() if isinstance(t, torch.Tensor)]
    tensors += [t for t in known.values() if isinstance(t, torch.Tensor)]
    return [t.clone() for t in tensors]


CASES = [
    (call, name, wrong)
    for call, names in CALLS.items()
    for name in names
    for wrong in WRONG
    if wrong not in ALLOWED.get(name, set()) | ALLOWED.get(f"{call} {name}", set())
]


@pytest.mark.parametrize(("call", "name", "wrong"), CASES)
def test_a_wrong_tensor_is_named_and_nothing_runs(
    m: ModuleType, verified: tuple[Round, Any], call: str, name: str, wrong: str
) -> None:
    r, factors = verified
    known = arguments(m, r, call)
    spoiled = known | {name: WRONG[wrong](known[name])}
    before = snapshot(factors, known)
    with pytest.raises(ValueError, match=r"\w+: .*expected .* got ") as caught:
        getattr(m, call)(factors=factors, **spoiled)
    blamed = {name}
    if "axis" in wrong and name in {"x", "q", "k", "v", "slots"}:
        # lengths that differ: which of two tensors is the odd one is open
        blamed |= {"x", "q", "k", "last_node"}
    if wrong == "device" and name in {"x", "q"}:
        # the others are expected where the rows are
        blamed |= {"conv_weight", "k"}
    named = str(caught.value).partition(":")[0]
    assert blamed & set(named.split(", "))
    assert all(same_bits(x, y) for x, y in zip(before, snapshot(factors, known), strict=True))
    assert factors.convolved is False


@pytest.mark.parametrize("call", ["verify", "verify_qkv", "commit"])
def test_the_right_arguments_are_taken(m: ModuleType, r: Round, call: str) -> None:
    factors = m.allocate(2, 1, "cpu")
    if call == "commit":
        r.verify(m, factors)
    getattr(m, call)(factors=factors, **arguments(m, r, call))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "schedule": (
        {"schedule": "fast"},
        r"schedule: expected one of \('tiled', 'folded'\), got 'fast'",
    ),
    "layer": ({"layer": 1}, r"layer: expected 0 to 0, got 1"),
    "negative layer": ({"layer": -1}, r"layer: expected 0 to 0, got -1"),
    "layer of a wrong type": ({"layer": "0"}, r"layer: expected 0 to 0, got '0'"),
    "slot": ({"slots": torch.tensor([0, 4])}, r"slots: expected below 4, got 4"),
    "nodes": ({"parents": torch.tensor([[-1] * 3] * 2)}, r"parents: expected shape \(2, 4\)"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_wrong_values(m: ModuleType, r: Round, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        m.verify(factors=m.allocate(2, 1, "cpu"), **arguments(m, r, "verify") | options)


def test_more_rows_than_there_is_room_for(m: ModuleType, r: Round) -> None:
    factors = m.allocate(1, 1, "cpu")
    with pytest.raises(ValueError, match=r"factors: expected room for batch 2 .* got batch 1"):
        r.verify(m, factors)
    with pytest.raises(ValueError, match=r"slots: expected at most 1 rows, got 2"):
        r.commit(m, factors, [0, 0])


def test_more_nodes_than_there_is_room_for(m: ModuleType) -> None:
    r = make_round(m, trees=[[-1] + [0] * 9] * 2)
    with pytest.raises(ValueError, match=r"x: expected 1 to 9 nodes, got 10"):
        r.verify(m, m.allocate(2, 1, "cpu"))
    with pytest.raises(ValueError, match=r"q: expected 1 to 9 nodes, got 10"):
        r.verify_qkv(m, m.allocate(2, 1, "cpu"))


def test_factors_of_another_module_are_refused_even_unchecked(m: ModuleType, r: Round) -> None:
    factors = build("any:9", depth=2, conv=3).allocate(2, 1, "cpu")
    factors.check = False
    for run in (r.verify, r.verify_qkv, lambda m, factors: r.commit(m, factors, [0, 0])):
        with pytest.raises(
            ValueError, match=r"factors: expected those of allocate\(\) of gdn_any9"
        ):
            run(m, factors)


def test_factors_on_another_device(m: ModuleType, r: Round) -> None:
    with pytest.raises(ValueError, match=r"factors: expected room .* on cpu, got .* on meta"):
        r.verify(m, m.allocate(2, 1, "meta"))


def test_what_is_written_may_not_overlap(m: ModuleType, r: Round) -> None:
    factors = m.allocate(2, 1, "cpu")
    out = torch.zeros(1, 4, 2, 16, dtype=r.x.dtype).expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="out: expected entries apart"):
        r.verify(m, factors, out=out)
    r.verify(m, factors)
    for name in ("state", "conv_state"):
        pools = {"state": r.state, "conv_state": r.conv_state}
        pools[name] = pools[name][:, :1].expand(-1, 4, *pools[name].shape[2:])
        with pytest.raises(ValueError, match=f"^{name}: expected entries apart"):
            m.commit(factors, *pools.values(), r.slots, torch.tensor([1, 2]))
    # layers and slots may lie in any order
    swapped = r.state.transpose(0, 1).contiguous().transpose(0, 1)
    m.commit(factors, swapped, r.conv_state, r.slots, torch.tensor([1, 2]))


def test_a_static_module_takes_no_parents() -> None:
    m = build("(2)")
    r = make_round(m)
    with pytest.raises(ValueError, match="parents: expected None"):
        r.verify(m, m.allocate(2, 1, "cpu"), parents=torch.tensor([[-1, 0, 0]] * 2))
    short = make_round(m, trees=[[-1, 0]] * 2)
    with pytest.raises(ValueError, match="x: expected 3 nodes, got 2"):
        short.verify(m, m.allocate(2, 1, "cpu"))


@pytest.mark.parametrize("missing", ["track_slots", "track_node"])
def test_tracking_needs_both(m: ModuleType, verified: tuple[Round, Any], missing: str) -> None:
    r, factors = verified
    with pytest.raises(ValueError, match="track_slots, track_node: expected both or neither"):
        m.commit(factors=factors, **arguments(m, r, "commit") | {missing: None})


@pytest.mark.parametrize("name", ["slots", "track_slots"])
def test_commit_checks_slots(m: ModuleType, verified: tuple[Round, Any], name: str) -> None:
    r, factors = verified
    wrong = {name: torch.tensor([0, 4])}
    with pytest.raises(ValueError, match=rf"{name}: expected below 4, got 4"):
        m.commit(factors=factors, **arguments(m, r, "commit") | wrong)


def test_commit_refuses_layers_that_were_never_verified(m: ModuleType) -> None:
    r = make_round(m, layers=2, trees=[TREE] * 2)
    factors = m.allocate(2, 1, "cpu")
    r.verify(m, factors)
    with pytest.raises(ValueError, match=r"state: expected at most 1 layers, got 2"):
        r.commit(m, factors, [0, 0])


def test_checks_can_be_switched_off(m: ModuleType, r: Round) -> None:
    factors = m.allocate(2, 1, "cpu")
    factors.check = False
    out = r.verify(m, factors, schedule="fast")
    assert out.shape == (2, 4, 2, 16)


@pytest.mark.parametrize(("batch", "layers"), [(-1, 1), (1, 0), (1, -2)])
def test_allocate_refuses(m: ModuleType, batch: int, layers: int) -> None:
    with pytest.raises(ValueError, match=r"(batch|layers): expected a whole number from"):
        m.allocate(batch, layers, "cpu")

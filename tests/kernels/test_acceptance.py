"""Commit writes the accepted path, whatever was accepted, and nothing else."""

from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen import oracle
from bolegen.ir import DType
from support.judge import numpy64
from support.rounds import (
    Round,
    Worst,
    build,
    check_commit,
    check_verify,
    make_round,
    play,
    poison,
    same_bits,
)

TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
KINDS: dict[str, dict[str, Any]] = {
    "static-replay": {"template": "parents:[-1,0,0,1,1,2,3,3,6]"},
    "static-pku": {"template": "parents:[-1,0,0,1,1,2,3,3,6]", "factors": "pku"},
    "runtime-replay": {"template": "any:12", "depth": 5},
    "runtime-pku": {"template": "any:12", "depth": 5, "factors": "pku"},
}
KINDS |= {
    "mamba2": KINDS["static-replay"] | {"mixer": "mamba2"},
    "lightning": KINDS["runtime-pku"] | {"mixer": "lightning"},
}
every_kind = pytest.mark.parametrize("m", KINDS, indirect=True)


@pytest.fixture(params=["static-pku", "runtime-replay"], scope="module")
def m(request: pytest.FixtureRequest) -> ModuleType:
    return build(value_heads=1, **KINDS[request.param])


@pytest.fixture(scope="module")
def ready(m: ModuleType) -> tuple[Any, Round]:
    """Factors after a verify of slots 4 and 1 of 7; commit only reads them."""
    r = nine_nodes(m, slots=7)
    r.slots = torch.tensor([4, 1])
    factors, was = verified(m, r)
    return factors, was


def nine_nodes(m: ModuleType, batch: int = 2, **options: Any) -> Round:
    return make_round(m, batch=batch, trees=[TREE] * batch, **options)


def verified(m: ModuleType, r: Round) -> tuple[Any, Round]:
    """Factors after one verify, and a copy of everything before the commit."""
    factors = poison(m.allocate(len(r.slots), r.x.shape[0], "cpu"))
    r.verify(m, factors)
    return factors, r.with_clones()


def judge(m: ModuleType, r: Round, was: Round, factors: Any, last: list[int], **k: Any) -> Worst:
    pools = (was.state, was.conv_state), (r.state, r.conv_state)
    return check_commit(m, was, factors, *pools, last, **k)


def assert_untouched(r: Round, was: Round) -> None:
    assert same_bits(r.state, was.state)
    assert same_bits(r.conv_state, was.conv_state)


@every_kind
@pytest.mark.parametrize(
    "last",
    [[-1, -1], [9, 17], [1 << 20, -(1 << 20)], [1 << 40, -(1 << 40)], [-2, 1 << 62]],
    ids=str,
)
def test_nothing_accepted_writes_nothing(
    m: ModuleType, ready: tuple[Any, Round], last: list[int]
) -> None:
    factors, was = ready
    r = was.with_clones()
    r.commit(m, factors, last)
    assert_untouched(r, was)


def test_a_dead_node_writes_nothing(m: ModuleType) -> None:
    r = nine_nodes(m)
    r.live = torch.ones(2, 9, dtype=torch.bool)
    r.live[:, [3, 6, 7, 8]] = False
    factors, was = verified(m, r)
    r.commit(m, factors, [8, 3])
    assert_untouched(r, was)


@every_kind
@pytest.mark.parametrize("node", range(9))
def test_every_node_as_the_last_one(m: ModuleType, ready: tuple[Any, Round], node: int) -> None:
    # among them paths that are no dense prefix, [0, 2, 5], and the root alone
    factors, was = ready
    r = was.with_clones()
    r.commit(m, factors, [node, 8 - node])
    judge(m, r, was, factors, [node, 8 - node]).assert_within()


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_windows_reach_through_ancestors(width: int, layout: str) -> None:
    m = build("parents:[-1,0,0,1,2,4]", conv=width, factors=layout)
    r = make_round(m, batch=1)
    factors, was = verified(m, r)
    r.commit(m, factors, [5])
    slot, rows = int(r.slots[0]), r.x[0, 0]
    history = torch.cat([was.conv_state[0, slot], rows[[0, 2, 4, 5]].t()], dim=1)
    assert torch.equal(r.conv_state[0, slot], history[:, -(width - 1) :])
    for node in (0, 3):
        play(m, make_round(m, batch=1), [node]).assert_within()


def test_the_first_child_sees_root_and_window_only() -> None:
    # depth-1 star of width-4 windows: child = committed[-2:], root, itself
    m = build("(4)", value_heads=1)
    r = make_round(m, batch=1)
    r.conv_weight[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    factors = poison(m.allocate(1, 1, "cpu"))
    r.verify(m, factors)
    window, rows = r.conv_state[0, int(r.slots[0])].float(), r.x[0, 0].float()
    for child in range(1, 5):
        sums = window[:, 1] + 2 * window[:, 2] + 3 * rows[0] + 4 * rows[child]
        want = torch.nn.functional.silu(sums)
        assert torch.allclose(
            factors.convolved_rows(0)[0, child].float(), want, rtol=2**-7, atol=1e-5
        )


TRACKS = {
    "an ancestor": 3,
    "the root": 0,
    "the last node itself": 8,
    "not on the path": 2,
    "below the last node": 7,
    "none": -1,
    "out of range": 1 << 40,
}


@every_kind
@pytest.mark.parametrize("node", TRACKS.values(), ids=TRACKS.keys())
def test_tracked_ancestors(m: ModuleType, ready: tuple[Any, Round], node: int) -> None:
    last, tracked = [8, 6], [node, 1]
    factors, was = ready
    r = was.with_clones()
    options = {"track_slots": torch.tensor([2, 6]), "track_node": torch.tensor(tracked)}
    r.commit(m, factors, last, **options)
    judge(m, r, was, factors, last, tracks=[(2, node), (6, 1)]).assert_within()


@every_kind
@pytest.mark.parametrize("slots", [[-1, -1], [4, 1], [-5, 2]])
def test_tracked_slots_that_are_none_or_the_row_s_own(
    m: ModuleType, ready: tuple[Any, Round], slots: list[int]
) -> None:
    factors, was = ready
    r = was.with_clones()
    r.commit(m, factors, [8, 6], track_slots=torch.tensor(slots), track_node=torch.tensor([3, 3]))
    judge(m, r, was, factors, [8, 6], tracks=[(slots[0], 3), (slots[1], 3)]).assert_within()


def test_tracking_changes_no_bit_of_the_commit(m: ModuleType, ready: tuple[Any, Round]) -> None:
    factors, was = ready
    r, plain = was.with_clones(), was.with_clones()
    plain.commit(m, factors, [8, -1])
    track = {"track_slots": torch.tensor([0, 6]), "track_node": torch.tensor([0, 0])}
    r.commit(m, factors, [8, -1], **track)
    kept = [1, 2, 3, 4, 5, 6]
    assert same_bits(r.state[:, kept], plain.state[:, kept])
    assert same_bits(r.conv_state[:, kept], plain.conv_state[:, kept])


def test_a_padded_row_is_not_tracked(m: ModuleType) -> None:
    r = nine_nodes(m)
    r.slots = torch.tensor([-1, 2])
    factors, was = verified(m, r)
    track = {"track_slots": torch.tensor([0, 3]), "track_node": torch.tensor([0, 0])}
    r.commit(m, factors, [8, -1], **track)
    assert_untouched(r, was)


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("state_dtype", [DType.FP32, DType.BF16])
def test_rows_convolved_by_the_engine(state_dtype: DType, layout: str) -> None:
    m = build("(2,2)", factors=layout, state_dtype=state_dtype)
    r = make_round(m)
    play(m, r, [5, 1], convolved=True).assert_within()


@pytest.mark.parametrize("convolved", [False, True])
def test_commit_wants_windows_exactly_after_verify(m: ModuleType, convolved: bool) -> None:
    r = nine_nodes(m)
    factors = m.allocate(2, 1, "cpu")
    run = r.verify_qkv if convolved else r.verify
    run(m, factors)
    was, last = r.with_clones(), torch.tensor([1, 1])
    wrong = r.conv_state if convolved else None
    with pytest.raises(ValueError, match=r"conv_state: expected None after verify_qkv"):
        m.commit(factors, r.state, wrong, r.slots, last)
    assert_untouched(r, was)


def test_every_request_has_its_own_number_of_nodes(m: ModuleType) -> None:
    live = [1, 8, 1, 5]
    r = nine_nodes(m, batch=4, slots=5)
    r.live = torch.arange(9)[None, :] < torch.tensor(live)[:, None]
    play(m, r, [n - 1 for n in live]).assert_within()


@pytest.mark.parametrize(
    ("mixer", "layout", "strided"),
    [
        *(("gdn", layout, strided) for layout in ("replay", "pku") for strided in (False, True)),
        ("mamba2", "replay", True),
        ("lightning", "pku", False),
    ],
)
def test_one_commit_for_all_layers(mixer: str, layout: str, strided: bool) -> None:
    m = build("(2,1)", factors=layout, mixer=mixer)
    r = make_round(m, layers=3, bias=True)
    if strided:
        # an engine's pool: all layers of a slot together, and a gap behind each slot
        for name in ("state", "conv_state"):
            pool = getattr(r, name)
            held = torch.full((pool.shape[1], pool.shape[0] + 1, *pool.shape[2:]), 9.0)
            view = held.to(pool.dtype)[:, :-1].transpose(0, 1)
            setattr(r, name, view.copy_(pool))
    factors = poison(m.allocate(3, 5, "cpu"))
    kept = []
    for layer in range(3):
        out = r.verify(m, factors, layer)
        check_verify(m, r, out, factors, layer).assert_within()
        kept.append(factors.convolved_rows(layer).clone())
    was = r.with_clones()
    r.commit(m, factors, [4, 2])
    for layer, qkv in enumerate(kept):
        judge(m, r, was, factors, [4, 2], layer=layer, qkv=qkv).assert_within()


@pytest.mark.parametrize("kind", ["static-replay", "runtime-pku"])
def test_layers_may_be_verified_in_any_order_and_again(kind: str) -> None:
    m = build(value_heads=1, **KINDS[kind])
    r = nine_nodes(m, layers=2)
    states = []
    for order in ((0, 1), (1, 0, 1, 0)):
        factors, copy = poison(m.allocate(2, 2, "cpu")), r.with_clones()
        for layer in order:
            copy.verify(m, factors, layer)
        copy.commit(m, factors, [8, 5])
        states.append(copy.state)
    assert same_bits(*states)


@every_kind
def test_an_empty_batch(m: ModuleType) -> None:
    r = nine_nodes(m, batch=1)
    none = {name: getattr(r, name)[:, :0] for name in ("x", "a", "b")}
    parents = None if r.parents is None else r.parents[:0]
    empty = r.with_clones(**none, slots=r.slots[:0], parents=parents)
    for room in (0, 2):
        factors = m.allocate(room, 1, "cpu")
        for run in (empty.verify, empty.verify_qkv):
            assert run(m, factors).shape == (0, 9, 1, 16)
            empty.commit(m, factors, [])
        track = torch.empty(0, dtype=torch.int64)
        empty.commit(m, factors, [], track_slots=track, track_node=track)
    assert_untouched(empty, r)


def test_outputs_of_verify_lead_to_the_committed_state() -> None:
    # the state after a path, read by a query, is that node's output: both come from one truth
    m = build("chain:3", dtype=DType.FP32, value_heads=1)
    r = make_round(m, batch=1)
    factors = m.allocate(1, 1, "cpu")
    out = r.verify(m, factors)
    q, _, _ = oracle.split_rows(
        numpy64(factors.convolved_rows(0)[0]), key_heads=1, value_heads=1, d_k=16
    )
    r.commit(m, factors, [3])
    query, _ = oracle.normalise(q, q)
    read = numpy64(r.state[0, int(r.slots[0]), 0]) @ query[3, 0]
    assert abs(read - numpy64(out[0, 3, 0])).max() < 1e-5

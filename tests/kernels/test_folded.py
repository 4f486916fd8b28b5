"""A commit that is left to the next verify gives every bit that the two steps give."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import cycle, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bolegen.codegen import compile_plan, plan_template
from bolegen.ir import DType, LayerSpec
from support.drift import History
from support.judge import Worst
from support.rounds import Round, build, import_module, make_round, poison, same_bits

TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
OTHER = [-1, 0, 1, 1, 0, 4, 5, 5, 2]
STATIC = "parents:[-1,0,0,1,1,2,3,3,6]"
RUNTIME: dict[str, Any] = {"template": "any:12", "depth": 5, "value_heads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "static-replay": {"template": STATIC},
    "static-pku": {"template": STATIC, "factors": "pku", "value_heads": 1},
    "runtime-replay": RUNTIME,
    "runtime-pku-bf16-pool": RUNTIME | {"factors": "pku", "state_dtype": DType.BF16},
    "narrow-bf16-pool": {"template": STATIC, "conv": 2, "value_heads": 1,
                         "dtype": DType.FP32, "state_dtype": DType.BF16},
    "kda-runtime": RUNTIME | {"mixer": "kda"},
}  # fmt: skip
SHARED = ("state", "conv_state", "slots", "conv_weight", "A_log", "dt_bias")
KEPT = ("rows", "kept", "gates", "rates", "keys", "u", "live", "parents")
NAN = float("nan")
FAR = 1 << 40  # within 32 bits it would be node 0


@pytest.fixture(params=KINDS, scope="module")
def m(request: pytest.FixtureRequest) -> ModuleType:
    return build(**KINDS[request.param])


def two_rounds(m: ModuleType, *, batch: int = 4, layers: int = 1) -> tuple[Round, Round]:
    """A round and the one after it, of another tree where it may be, on the same slots."""
    first, second = (
        make_round(m, batch=batch, slots=batch + 2, layers=layers, seed=seed, trees=[tree] * batch)
        for seed, tree in enumerate((TREE, TREE if m.MODULE.parents else OTHER))
    )
    return first, replace(second, **{name: getattr(first, name) for name in SHARED})


def memory(m: ModuleType, r: Round) -> Any:
    return poison(m.allocate(len(r.slots), r.x.shape[0], "cpu"))


def verified(m: ModuleType, r: Round, name: str = "verify") -> Any:
    """Memory of a round whose layers are verified; ways to commit it start from copies."""
    factors = memory(m, r)
    for layer in range(len(r.state)):
        getattr(r, name)(m, factors, layer)
    return factors


@pytest.fixture(scope="module")
def ready(m: ModuleType) -> tuple[tuple[Round, Round], Any]:
    """Two rounds and memory of the first, verified; tests work on copies."""
    rounds = two_rounds(m)
    return rounds, verified(m, rounds[0])


def written(factors: Any, r: Round) -> list[torch.Tensor]:
    """What verify left for commit in the live nodes of the rows that are not padded."""
    n, found = r.x.shape[2], [factors.live]
    for row in (r.slots >= 0).nonzero().flatten().tolist():
        live = slice(n) if r.live is None else r.live[row].nonzero().flatten()
        windows = [] if factors.convolved else [factors.rows[:, row, : -factors.live.shape[1]]]
        rows = factors.rows[:, row, -factors.live.shape[1] :]
        found += [*windows, factors.gates[:, row, live]]
        if not factors.convolved:  # else rows of scratch may stand in another order
            found.append(rows[:, live])
        if factors.keys is not None:
            found += [factors.keys[:, row, live], factors.u[:, row, live]]
    return found


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert same_bits(a, b)


def compare(
    m: ModuleType,
    rounds: tuple[Round, Round],
    last: list[int],
    *,
    done: Any = None,
    convolved: bool = False,
) -> tuple[Round, Round]:
    """Both ways through two rounds: apart, then folded; all bits of both are the same.

    ``done`` is memory of the first round where that is verified already.
    """
    name = "verify_qkv" if convolved else "verify"
    done, ends = done or verified(m, rounds[0], name), []
    for folded in (False, True):
        pools = rounds[0].state.clone(), rounds[0].conv_state.clone()
        first, second = (replace(r, state=pools[0], conv_state=pools[1]) for r in rounds)
        old, new = deepcopy(done), memory(m, second)
        new.convolved = convolved
        options = {"pending": (old, torch.tensor(last))} if folded else {}
        if not folded:
            first.commit(m, old, last)
        kept = [t.clone() for t in map(vars(old).get, KEPT) if t is not None]
        outs = [getattr(second, name)(m, new, layer, **options) for layer in range(len(pools[0]))]
        assert_same(kept, [t for t in map(vars(old).get, KEPT) if t is not None])
        ends.append(([*outs, *pools, *written(new, second)], second))
    assert_same(ends[0][0], ends[1][0])
    return ends[0][1], ends[1][1]


# the deepest, shorter than a window, none, and a number that is a node in 32 bits only
LAST = [8, 1, -1, FAR]


def test_outputs_states_windows_and_factors_are_those_of_two_steps(
    m: ModuleType, ready: tuple[tuple[Round, Round], Any]
) -> None:
    rounds, done = ready
    before = rounds[0].state.clone()
    _, folded = compare(m, rounds, LAST, done=done)
    moved = [not same_bits(folded.state[0, s], before[0, s]) for s in rounds[0].slots.tolist()]
    assert moved == [True, True, False, False]


def test_dead_nodes_and_padded_rows(m: ModuleType) -> None:
    first, second = two_rounds(m, batch=5)
    first.live = torch.ones(5, 9, dtype=torch.bool)
    first.live[:2, [3, 6, 7, 8]] = False
    second.live = torch.ones(5, 9, dtype=torch.bool)
    second.live[0, 8] = False
    second.live[1, 1:] = False
    # row 3 is new in the second round, row 4 is gone
    slots = first.slots.clone()
    first.slots = slots.clone()
    first.slots[3] = -1
    second.slots = slots.clone()
    second.slots[4] = -7
    for r in (first, second):
        assert r.live is not None
        for tensor in (r.x, r.a, r.b):
            tensor[:, r.live.logical_not()] = NAN
            tensor[:, r.slots < 0] = NAN
    unused = sorted(set(range(7)) - set(slots.tolist()))
    first.state[:, unused] = NAN
    first.conv_state[:, unused] = NAN
    before = first.state.clone()
    # dead, live, the first that is out of range, of no round before, of nobody now
    last = [6, 4, m.MODULE.nodes, 8, 3]
    done, ends = verified(m, first), []
    for folded in (False, True):
        pools = first.state.clone(), first.conv_state.clone()
        one, two = (replace(r, state=pools[0], conv_state=pools[1]) for r in (first, second))
        old, new = deepcopy(done), memory(m, two)
        if not folded:
            # the row that is padded now is nobody's to commit
            one.commit(m, old, [*last[:4], -1])
        out = two.verify(m, new, pending=(old, torch.tensor(last)) if folded else None)
        ends.append([out, *pools, *written(new, two)])
    assert_same(*ends)
    moved = [not same_bits(ends[1][1][0, s], before[0, s]) for s in slots.tolist()]
    assert moved == [False, True, False, False, False]
    assert torch.isfinite(ends[1][0]).all()


def test_rows_that_need_no_convolution(m: ModuleType) -> None:
    rounds = two_rounds(m, batch=2)
    window = rounds[0].conv_state.clone()
    _, folded = compare(m, rounds, [8, -1], convolved=True)
    assert same_bits(folded.conv_state, window)


@pytest.mark.parametrize("kind", ["static-replay", "runtime-pku-bf16-pool"])
def test_several_layers(kind: str) -> None:
    m = build(**KINDS[kind])
    compare(m, two_rounds(m, batch=2, layers=2), [8, 1])


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("tiling", [{"b_v": 16, "merge_batch": 0}, {"merge_batch": 2}], ids=str)
def test_value_tiles_and_schedules_of_any_size(layout: str, tiling: dict[str, Any]) -> None:
    # a value tile of solve may be smaller than one of commit; heads and dims that are not full
    spec = LayerSpec(key_heads=1, value_heads=3, d_k=24, d_v=40, factors=layout)
    plan = plan_template(STATIC, spec)
    assert plan.tiling.b_t == 64
    m = import_module(compile_plan(replace(plan, tiling=replace(plan.tiling, **tiling))))
    compare(m, two_rounds(m, batch=2), [8, 3])


def test_flush_is_commit(m: ModuleType, ready: tuple[tuple[Round, Round], Any]) -> None:
    (r, _), done = ready
    ends = []
    for name in ("commit", "flush"):
        one, factors = r.with_clones(), deepcopy(done)
        other = sorted(set(range(6)) - set(r.slots.tolist()))
        tracks = torch.tensor([*other, -1, -1])
        getattr(m, name)(
            factors, one.state, one.conv_state, one.slots, torch.tensor(LAST),
            track_slots=tracks, track_node=torch.tensor([3, 0, 0, 0]),
        )  # fmt: skip
        ends.append((one.state, one.conv_state))
    assert_same(*ends)
    assert not same_bits(ends[0][0], r.state)


def chain_of(m: ModuleType, rounds: int) -> Iterator[Round]:
    """Rounds on the same pools, slots and weights; each with other rows and trees, if any."""
    trees = cycle([TREE, OTHER, TREE[:4]] if m.MODULE.parents is None else [TREE])
    first = make_round(m, trees=[TREE] * 2, slots=3, write=1.0, log_rate=(-6.0, -2.0))
    for seed in range(rounds):
        fresh = make_round(m, seed=seed, trees=[next(trees)] * 2, repeat=0.4, write=1.0)
        yield replace(fresh, **{name: getattr(first, name) for name in SHARED})


def test_two_buffers_in_turn_follow_the_recurrence(m: ModuleType) -> None:
    numbers = np.random.default_rng(1)
    rounds = list(chain_of(m, 4))
    slots = [int(slot) for slot in rounds[0].slots]
    histories = [History(m, rounds[0], slot) for slot in slots]
    buffers = memory(m, rounds[0]), memory(m, rounds[0])
    last = [-1, -1]
    for number, (r, after) in enumerate(pairwise([*rounds, rounds[0]])):
        new, old = buffers[number % 2], buffers[1 - number % 2]
        r.verify(m, new, pending=(old, torch.tensor(last)))
        for row, slot in enumerate(slots):
            worst = Worst()
            histories[row].judge(r, slot, worst)
            worst.assert_within()
        last = [int(numbers.integers(-1, r.x.shape[2])) for _ in slots]
        for row in range(len(slots)):
            histories[row].accept(m, r, new, row, last[row])
        assert after.state is r.state
    m.flush(new, r.state, r.conv_state, r.slots, torch.tensor(last))
    for row, slot in enumerate(slots):
        worst = Worst()
        histories[row].judge(r, slot, worst)
        worst.assert_within()


def test_a_schedule_may_be_pinned() -> None:
    m = build(**KINDS["static-replay"])
    assert m.MODULE.schedules == ("tiled", "folded")
    first, second = two_rounds(m, batch=2)
    old, new = memory(m, first), memory(m, second)
    out = first.verify(m, old, schedule="tiled")
    assert same_bits(out, first.verify(m, old, schedule="folded"))
    last = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="pending: expected None under schedule 'tiled'"):
        second.verify(m, new, schedule="tiled", pending=(old, last))
    second.verify(m, new, schedule="folded", pending=(old, last))


LAST_2 = torch.tensor([1, 2])
REFUSED: dict[str, tuple[Any, str]] = {
    "same": (lambda old, new: (new, LAST_2), "pending: expected other factors than this round's"),
    "one": (lambda old, new: old, r"pending: expected \(factors, last_node\), got Factors"),
    "three": (lambda old, new: (old, LAST_2, 0), r"pending: expected \(factors, last_node\)"),
    "foreign": (lambda old, new: (LAST_2, LAST_2), "pending: expected factors of allocate.. of"),
    "float": (lambda old, new: (old, LAST_2.float()), "pending last_node: expected torch.int32"),
    "short": (lambda old, new: (old, LAST_2[:1]), r"pending last_node: expected shape \(2,\)"),
    "list": (lambda old, new: (old, [1, 2]), "pending last_node: expected a tensor, got list"),
    "apart": (lambda old, new: (old, torch.stack([LAST_2] * 2, 1)[:, 0]),
              "pending last_node: expected strides"),
    "device": (lambda old, new: (old, LAST_2.to("meta")), "pending last_node: expected device"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> tuple[ModuleType, Round, Round, Any]:
    m = build(**KINDS["static-replay"])
    first, second = two_rounds(m, batch=2)
    return m, first, second, verified(m, first)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_pending_is_refused_before_anything_is_written(
    case: str, shared: tuple[ModuleType, Round, Round, Any]
) -> None:
    m, first, second, old = shared
    new = memory(m, second)
    before = first.with_clones()
    make, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        second.verify(m, new, pending=make(old, new))
    assert_same((first.state, first.conv_state), (before.state, before.conv_state))


def test_factors_too_small_or_of_the_other_verify_are_refused() -> None:
    m = build(**KINDS["static-replay"])
    first, second = two_rounds(m, batch=2, layers=2)
    new = memory(m, second)
    said = "pending: expected factors of layer 1 and 2 rows on cpu, got {} layers and {} rows"
    for batch, layers in ((2, 1), (1, 2)):
        old = m.allocate(batch, layers, "cpu")
        with pytest.raises(ValueError, match=said.format(layers, batch)):
            second.verify(m, new, 1, pending=(old, LAST_2))
    old = m.allocate(2, 2, "cpu")
    first.verify_qkv(m, old)
    with pytest.raises(ValueError, match="pending: factors of verify_qkv are not for verify"):
        second.verify(m, new, pending=(old, LAST_2))
    # with nothing pending it does not matter whose they were
    second.verify(m, new, pending=(old, torch.tensor([-1, -1])))
    first.verify(m, old)
    with pytest.raises(ValueError, match="pending: factors of verify are not for verify_qkv"):
        second.verify_qkv(m, new, pending=(old, LAST_2))

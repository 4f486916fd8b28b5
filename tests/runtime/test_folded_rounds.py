"""A folded round commits in the next round's verify: the same bits, and each layer once."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import (
    CanonicalState,
    CheckedError,
    CheckedModule,
    LayerWeights,
    LifetimeError,
    Round,
    Settings,
    SlotClaims,
    load,
)
from support.rounds import Round as Data
from support.rounds import make_round, same_bits

LAYERS = 2
LASTS = ([2, 0], [-1, 2], [1, 1])


@pytest.fixture(scope="module")
def m() -> ModuleType:
    return load("chain:2", heads=(1, 1), dims=(16, 16), settings=Settings())


def draw(m: ModuleType, count: int = 3) -> list[Data]:
    """Rounds on the same pools, slots and weights."""
    drawn = [make_round(m, layers=LAYERS, seed=seed) for seed in range(count)]
    shared = ("state", "conv_state", "slots", "conv_weight", "A_log", "dt_bias")
    return [replace(r, **{name: getattr(drawn[0], name) for name in shared}) for r in drawn]


def start(
    m: ModuleType, r: Data, *, folded: bool = True, claims: SlotClaims | None = None
) -> Round:
    pools = CanonicalState(r.state, r.conv_state)
    return Round(m, pools, batch=2, claims=claims, folded=folded)


def verify(turn: Round, r: Data, layer: int) -> torch.Tensor:
    weights = LayerWeights(r.conv_weight[layer], r.A_log[layer], r.dt_bias[layer])
    return turn.verify(layer, r.x[layer], r.a[layer], r.b[layer], weights, r.slots)


def commit_now(turn: Round, slots: torch.Tensor, last: list[int]) -> None:
    turn.commit(slots, torch.tensor(last))
    turn.flush(slots)


def play(turn: Round, r: Data, last: list[int]) -> list[torch.Tensor]:
    turn.begin(r.slots)
    outs = [verify(turn, r, layer) for layer in range(LAYERS)]
    turn.commit(r.slots, torch.tensor(last))
    return outs


@pytest.fixture(scope="module")
def apart(m: ModuleType) -> list[torch.Tensor]:
    """Outputs, states and windows of rounds that commit at once."""
    rounds = draw(m)
    turn = start(m, rounds[0], folded=False)
    outs = [out for r, last in zip(rounds, LASTS, strict=True) for out in play(turn, r, last)]
    return [*outs, rounds[0].state, rounds[0].conv_state]


def assert_all_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(
    ("wrap", "claims"),
    [(lambda m: m, SlotClaims()), (CheckedModule, None)],
    ids=["claims", "checked"],
)
def test_folded_rounds_are_those_that_commit_at_once(
    m: ModuleType,
    apart: list[torch.Tensor],
    wrap: Callable[[ModuleType], ModuleType],
    claims: SlotClaims | None,
) -> None:
    rounds = draw(m)
    turn = start(wrap(m), rounds[0], claims=claims)
    outs = [out for r, last in zip(rounds, LASTS, strict=True) for out in play(turn, r, last)]
    assert not same_bits(rounds[0].state, apart[-2])
    turn.flush(rounds[0].slots)
    with pytest.raises(LifetimeError, match="nothing is pending"):
        turn.flush(rounds[0].slots)
    assert_all_same([*outs, rounds[0].state, rounds[0].conv_state], apart)


@pytest.mark.parametrize("again", [True, False], ids=["verified again", "flushed"])
@pytest.mark.parametrize(
    ("wrap", "claims"),
    [(lambda m: m, SlotClaims()), (CheckedModule, None)],
    ids=["claims", "checked"],
)
def test_a_round_dropped_half_way_commits_no_layer_twice(
    m: ModuleType,
    apart: list[torch.Tensor],
    again: bool,
    wrap: Callable[[ModuleType], ModuleType],
    claims: SlotClaims | None,
) -> None:
    rounds = draw(m)
    turn = start(wrap(m), rounds[0], claims=claims)
    play(turn, rounds[0], LASTS[0])
    turn.begin(rounds[0].slots)
    verify(turn, rounds[1], 0)
    turn.discard()
    assert turn.pending
    if not again:
        turn.flush(rounds[0].slots)
    for r, last in zip(rounds[1:], LASTS[1:], strict=True):
        play(turn, r, last)
    turn.flush(rounds[0].slots)
    assert_all_same([rounds[0].state, rounds[0].conv_state], apart[-2:])


def test_flush_has_its_turn(m: ModuleType) -> None:
    r = draw(m, 1)[0]
    turn = start(m, r)
    with pytest.raises(LifetimeError, match="nothing is pending"):
        turn.flush(r.slots)
    play(turn, r, [2, 2])
    with pytest.raises(LifetimeError, match="a round of 2 rows is pending, and this one has 1"):
        turn.begin(r.slots[:1])
    turn.begin(r.slots)
    with pytest.raises(LifetimeError, match="another round is open"):
        turn.flush(r.slots)
    turn.discard()
    before = r.state.clone()
    turn.flush(r.slots)
    assert not same_bits(r.state, before)
    turn.begin(r.slots[:1])


def test_a_flush_tracks_an_ancestor(m: ModuleType) -> None:
    r = draw(m, 1)[0]
    turn = start(m, r)
    free = [slot for slot in range(4) if slot not in r.slots.tolist()]
    tracks = {"track_slots": torch.tensor(free), "track_node": torch.tensor([1, -1])}
    turn.begin(r.slots)
    for layer in range(LAYERS):
        verify(turn, r, layer)
    with pytest.raises(LifetimeError, match="track_slots: a folded round is not written yet"):
        turn.commit(r.slots, torch.tensor([2, 2]), **tracks)
    turn.commit(r.slots, torch.tensor([2, 2]))
    before = r.state.clone()
    turn.flush(r.slots, **tracks)
    moved = [not same_bits(r.state[:, slot], before[:, slot]) for slot in free]
    assert moved == [True, False]


@pytest.mark.parametrize("last", [torch.tensor([2.0, 2.0]), torch.tensor([2]), [2, 2], None])
def test_accepted_nodes_are_refused_before_they_are_kept(m: ModuleType, last: Any) -> None:
    r = draw(m, 1)[0]
    turn = start(m, r)
    turn.begin(r.slots)
    for layer in range(LAYERS):
        verify(turn, r, layer)
    with pytest.raises(ValueError, match="last_node: expected"):
        turn.commit(r.slots, last)
    assert not turn.pending
    turn.commit(r.slots, torch.tensor([2, 2]))


def test_claims_find_a_slot_that_was_written_while_its_round_was_pending(m: ModuleType) -> None:
    r = draw(m, 1)[0]
    turn = start(m, r, claims=SlotClaims())
    play(turn, r, [2, 2])
    r.state[1, r.slots[1]] += 1.0
    for call in (turn.begin, turn.flush):
        with pytest.raises(LifetimeError, match="was written since it was verified"):
            call(r.slots)
    with pytest.raises(LifetimeError, match="the round began with"):
        turn.begin(r.slots.flip(0))


@pytest.mark.parametrize("folded", [False, True])
def test_a_request_that_moved_to_another_row_is_no_padding(m: ModuleType, folded: bool) -> None:
    r = draw(m, 1)[0]
    began, moved = r.slots.clone(), r.slots.flip(0)
    began[0] = moved[1] = -1  # the one request was in row 1, and is in row 0
    for module, claims in ((m, SlotClaims()), (CheckedModule(m), None)):
        turn = start(module, replace(r, slots=began), folded=folded, claims=claims)
        turn.begin(began)
        for layer in range(LAYERS):
            verify(turn, replace(r, slots=began), layer)
        with pytest.raises((LifetimeError, CheckedError), match=r"began with|was verified from"):
            commit_now(turn, moved, [2, 2])


def test_a_begin_that_is_refused_leaves_what_is_pending(m: ModuleType) -> None:
    r = draw(m, 1)[0]
    pools, claims = CanonicalState(r.state, r.conv_state), SlotClaims()
    both = tuple(m.allocate(2, r.state.shape[0], "cpu") for _ in range(2))
    turn = Round(m, pools, factors=both, folded=True, claims=claims)
    play(turn, r, [2, 2])
    other = Round(m, pools, factors=both[1], claims=claims)
    free = [slot for slot in range(r.state.shape[1]) if slot not in r.slots.tolist()]
    other.begin(torch.tensor(free[:2]))
    with pytest.raises(LifetimeError, match="these factors hold another round"):
        turn.begin(r.slots)
    turn.flush(r.slots)


def test_checked_mode_finds_a_pending_round_that_is_used_twice(m: ModuleType) -> None:
    first, second = draw(m, 2)
    checked = CheckedModule(m)
    old, new = (m.allocate(2, LAYERS, "cpu") for _ in range(2))
    last = torch.tensor([1, 0])
    first.verify(checked, old, 0)
    second.verify(checked, new, 0, pending=(old, last))
    with pytest.raises(CheckedError, match="pending: layer 0 was not verified"):
        second.verify(checked, new, 0, pending=(old, last))
    with pytest.raises(CheckedError, match="layer 0 was not"):
        first.commit(checked, old, [1, 0])


def test_a_refused_verify_leaves_the_pending_round_to_the_next(m: ModuleType) -> None:
    first, second = draw(m, 2)
    checked = CheckedModule(m)
    old, new = (m.allocate(2, LAYERS, "cpu") for _ in range(2))
    pending = old, torch.tensor([1, 0])
    first.verify(checked, old, 0)
    with pytest.raises(ValueError, match="schedule: expected one of"):
        second.verify(checked, new, 0, pending=pending, schedule="other")
    second.verify(checked, new, 0, pending=pending)


def test_checked_mode_finds_a_state_that_the_pending_round_left_wrong(m: ModuleType) -> None:
    first, second = draw(m, 2)

    @wraps(m.verify)
    def verify(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = m.verify(*args, **kwargs)
        if "pending" in kwargs:
            first.state[0, first.slots[1]] *= 1.01
        return out

    faulty = ModuleType("faulty")
    vars(faulty).update(vars(m) | {"verify": verify})
    checked = CheckedModule(faulty)
    old, new = (m.allocate(2, LAYERS, "cpu") for _ in range(2))
    first.verify(checked, old, 0)
    with pytest.raises(CheckedError, match="state: layer 0, request 1"):
        second.verify(checked, new, 0, pending=(old, torch.tensor([1, 0])))


def test_a_pair_of_factors_is_for_folded_rounds(m: ModuleType) -> None:
    r = draw(m, 1)[0]
    pools, factors = CanonicalState(r.state, r.conv_state), m.allocate(2, LAYERS, "cpu")
    with pytest.raises(ValueError, match="factors: expected a pair"):
        Round(m, pools, factors=factors, folded=True)
    with pytest.raises(ValueError, match="factors: expected a pair"):
        Round(m, pools, factors=(factors, factors))
    with pytest.raises(ValueError, match="factors: expected a pair"):
        Round(m, pools, factors=(factors,), folded=True)

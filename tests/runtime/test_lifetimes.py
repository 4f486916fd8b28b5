"""Committed states, factors and scratch stay apart; each call of a round has its turn."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import (
    CanonicalState,
    LayerWeights,
    LifetimeError,
    Round,
    SlotClaims,
    split_factors,
)
from support.rounds import Round as Data
from support.rounds import build, make_round, poison, same_bits, split

LAYERS, SLOTS = 2, 6
LAST = torch.tensor([2, 1])
Committed = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def m() -> ModuleType:
    return build("chain:2", value_heads=1)


@pytest.fixture
def data(m: ModuleType) -> Data:
    return draw(m)


@pytest.fixture
def stub(m: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with a verify that runs nothing and a commit that counts in each slot."""

    def commit(
        _: Any, state: torch.Tensor, window: Any, slots: torch.Tensor, last: Any, **options: Any
    ) -> None:
        if len(last) != len(slots):
            raise ValueError("last_node: expected shape")
        state[:, slots] += 1.0

    monkeypatch.setattr(m, "verify", lambda *_, **__: None)
    monkeypatch.setattr(m, "commit", commit)
    return m


def draw(m: ModuleType, seed: int = 0) -> Data:
    trees = None if m.MODULE.parents else [[-1, 0, 0, 1]] * 2
    r = make_round(m, layers=LAYERS, slots=SLOTS, seed=seed, trees=trees)
    r.slots = torch.tensor([4, 1])
    return r


def start(
    m: ModuleType, r: Data, *, claims: SlotClaims | None = None, over: Data | None = None
) -> Round:
    pools = over or r
    return Round(m, CanonicalState(pools.state, pools.conv_state), batch=2, claims=claims)


def verify(round_: Round, r: Data, layer: int, slots: torch.Tensor | None = None) -> torch.Tensor:
    weights = LayerWeights(r.conv_weight[layer], r.A_log[layer], r.dt_bias[layer])
    options = {"parents": r.parents}
    used = r.slots if slots is None else slots
    return round_.verify(layer, r.x[layer], r.a[layer], r.b[layer], weights, used, **options)


def verify_all(round_: Round, r: Data) -> list[torch.Tensor]:
    round_.begin(r.slots)
    return [verify(round_, r, layer) for layer in range(LAYERS)]


def expected(m: ModuleType, r: Data) -> Committed:
    """Outputs, states and windows after the module's own verify and commit."""
    r = r.with_clones()
    factors = m.allocate(2, LAYERS, "cpu")
    out = [r.verify(m, factors, layer) for layer in range(LAYERS)]
    r.commit(m, factors, LAST.tolist())
    return out, r.state, r.conv_state


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("template", ["chain:2", "any:4"])
def test_every_tensor_of_a_round_has_one_lifetime(template: str, layout: str) -> None:
    m = build(template, value_heads=1, factors=layout)
    allocated = m.allocate(2, LAYERS, "cpu")
    factors, scratch = split_factors(allocated)
    assert not set(factors.tensors) & set(scratch.tensors)
    tensors = {n for n, t in vars(allocated).items() if isinstance(t, torch.Tensor)}
    assert set(factors.tensors) | set(scratch.tensors) == tensors
    # what lives until acceptance is kept for each layer, or is the tree
    assert all(
        t.shape[0] == LAYERS or n in ("live", "parents") for n, t in factors.tensors.items()
    )


def test_a_module_of_another_kind_is_not_split_by_guess() -> None:
    allocated = build("chain:2").allocate(1, 1, "cpu")
    allocated.vectors = allocated.vectors[..., :1]
    object.__setattr__(allocated, "added", torch.zeros(3))
    with pytest.raises(ValueError, match="bytes of scratch as the module says, got"):
        split_factors(allocated)


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("template", ["chain:2", "any:4"])
def test_scratch_is_one_layers_and_nothing_reads_it_later(template: str, layout: str) -> None:
    m = build(template, value_heads=1, factors=layout)
    r = draw(m)
    out, state, window = expected(m, r)
    round_ = start(m, r)
    poison(round_.allocated)
    round_.begin(r.slots)
    for layer in range(LAYERS):
        assert same_bits(verify(round_, r, layer), out[layer])
        for tensor in round_.scratch.tensors.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 31))
    round_.commit(r.slots, LAST)
    assert same_bits(r.state, state)
    assert same_bits(r.conv_state, window)


def test_rounds_one_after_another_are_the_modules_own(m: ModuleType, data: Data) -> None:
    round_ = start(m, data, claims=SlotClaims())
    for _ in range(2):
        out, state, window = expected(m, data)
        got = verify_all(round_, data)
        assert all(same_bits(x, y) for x, y in zip(got, out, strict=True))
        round_.commit(data.slots, LAST)
        assert same_bits(data.state, state)
        assert same_bits(data.conv_state, window)


def test_verify_qkv_and_tracks_go_through() -> None:
    m = build("chain:2", value_heads=1)
    r = draw(m)
    round_ = Round(m, CanonicalState(r.state, None), batch=2, claims=SlotClaims())
    was = r.with_clones()
    factors = m.allocate(2, LAYERS, "cpu")
    round_.begin(r.slots)
    for layer in range(LAYERS):
        got = round_.verify_qkv(
            layer, *split(m, r.x[layer]), r.a[layer], r.b[layer], r.A_log[layer],
            r.dt_bias[layer], r.slots,
        )  # fmt: skip
        assert same_bits(got, was.verify_qkv(m, factors, layer))
    tracks = {"track_slots": torch.tensor([2, -1]), "track_node": torch.tensor([0, -1])}
    was.commit(m, factors, LAST.tolist(), **tracks)
    round_.commit(r.slots, LAST, **tracks)
    assert same_bits(r.state, was.state)


def unchanged(r: Data, was: Data) -> bool:
    return same_bits(r.state, was.state) and same_bits(r.conv_state, was.conv_state)


@pytest.mark.parametrize("checked", [False, True])
def test_nothing_is_committed_out_of_turn(stub: ModuleType, data: Data, checked: bool) -> None:
    round_, was = start(stub, data, claims=SlotClaims() if checked else None), data.with_clones()
    with pytest.raises(LifetimeError, match="no round to commit"):
        round_.commit(data.slots, LAST)
    with pytest.raises(LifetimeError, match="no round to verify; call begin"):
        verify(round_, data, 0)
    round_.begin(data.slots)
    verify(round_, data, 1)
    with pytest.raises(LifetimeError, match="layers 0 of this round were not verified"):
        round_.commit(data.slots, LAST)
    with pytest.raises(LifetimeError, match="layer 1 of this round is verified"):
        verify(round_, data, 1)
    with pytest.raises(ValueError, match="layer: expected a whole number from 0 to 1, got -1"):
        verify(round_, data, -1)
    assert unchanged(data, was)
    verify(round_, data, 0)
    round_.commit(data.slots, LAST)
    once = data.with_clones()
    assert not unchanged(data, was)
    with pytest.raises(LifetimeError, match="no round to commit"):
        round_.commit(data.slots, LAST)
    assert unchanged(data, once)


def test_a_refused_commit_can_be_made_again(stub: ModuleType, data: Data) -> None:
    round_, was = start(stub, data, claims=SlotClaims()), data.with_clones()
    verify_all(round_, data)
    with pytest.raises(ValueError, match="last_node: expected shape"):
        round_.commit(data.slots, LAST[:1])
    assert unchanged(data, was)
    round_.commit(data.slots, LAST)
    assert not unchanged(data, was)


class InjectedError(Exception):
    """Stands for whatever an engine may raise."""


@pytest.fixture(scope="module")
def wanted(m: ModuleType) -> Committed:
    return expected(m, draw(m))


@pytest.mark.parametrize(
    ("at", "inside"),
    [(0, False), (1, False), (2, False), (0, True), (1, True)],
    ids=["before 0", "before 1", "after all", "inside 0", "inside 1"],
)
def test_an_exception_leaves_slots_as_they_were(
    m: ModuleType,
    data: Data,
    wanted: Committed,
    at: int,
    inside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, state, window = wanted
    was, round_ = data.with_clones(), start(m, data, claims=SlotClaims())
    real: Callable[..., torch.Tensor] = m.verify

    def fail(*arguments: Any, **options: Any) -> torch.Tensor:
        result = real(*arguments, **options)
        if options["layer"] == at:
            raise InjectedError
        return result

    def play() -> None:
        round_.begin(data.slots)
        for layer in range(LAYERS):
            if layer == at and not inside:
                raise InjectedError
            verify(round_, data, layer)
        raise InjectedError  # between the last layer and commit

    if inside:
        monkeypatch.setattr(m, "verify", fail)
    with pytest.raises(InjectedError):
        play()
    monkeypatch.undo()
    assert unchanged(data, was)
    if at < LAYERS:
        with pytest.raises(LifetimeError, match="were not verified"):
            round_.commit(data.slots, LAST)
    round_.discard()
    with pytest.raises(LifetimeError, match="no round to commit"):
        round_.commit(data.slots, LAST)
    assert unchanged(data, was)
    # and the next round is as if nothing had been
    got = verify_all(round_, data)
    round_.commit(data.slots, LAST)
    assert all(same_bits(x, y) for x, y in zip(got, out, strict=True))
    assert same_bits(data.state, state)
    assert same_bits(data.conv_state, window)


def test_a_round_over_an_uncommitted_one_replaces_it_or_is_an_error(
    stub: ModuleType, data: Data
) -> None:
    plain = start(stub, data)
    verify_all(plain, data)
    plain.begin(data.slots)
    with pytest.raises(LifetimeError, match="layers 0, 1 of this round were not verified"):
        plain.commit(data.slots, LAST)
    checked = start(stub, data, claims=SlotClaims())
    verify_all(checked, data)
    with pytest.raises(LifetimeError, match="neither committed nor discarded"):
        checked.begin(data.slots)
    checked.commit(data.slots, LAST)
    checked.begin(data.slots)


def test_a_slot_belongs_to_one_round_at_a_time(stub: ModuleType, data: Data) -> None:
    claims = SlotClaims()
    first, second = (start(stub, data, claims=claims) for _ in range(2))
    first.begin(data.slots)
    with pytest.raises(LifetimeError, match="slot 1 has uncommitted factors of another round"):
        second.begin(torch.tensor([0, 1]))
    # and nothing of the refused round is claimed
    second.begin(torch.tensor([0, -1]))
    second.discard()
    first.discard()
    second.begin(torch.tensor([0, 1], dtype=torch.int32))


def test_two_rounds_in_flight_on_other_slots_commit_as_if_alone(m: ModuleType) -> None:
    one, other = draw(m), draw(m, seed=1)
    other.slots = torch.tensor([0, -1])
    for name in ("state", "conv_state", "conv_weight", "A_log", "dt_bias"):
        setattr(other, name, getattr(one, name))
    want = one.with_clones()
    for r in (one, other):
        _, want.state, want.conv_state = expected(
            m, r.with_clones(state=want.state, conv_state=want.conv_state)
        )
    claims = SlotClaims()
    first, second = (start(m, one, claims=claims) for _ in range(2))
    verify_all(first, one)
    verify_all(second, other)
    second.commit(other.slots, LAST)
    first.commit(one.slots, LAST)
    assert unchanged(one, want)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1, 1], "slot 1 is in two rows"),
        ([1, SLOTS], f"slots: expected below {SLOTS}, got {SLOTS}"),
    ],
)
def test_bad_slots(stub: ModuleType, data: Data, slots: list[int], message: str) -> None:
    claims = SlotClaims()
    round_ = start(stub, data, claims=claims)
    with pytest.raises(LifetimeError, match=message):
        round_.begin(torch.tensor(slots))
    round_.begin(data.slots)


def test_other_slots_than_the_rounds_are_refused(stub: ModuleType, data: Data) -> None:
    round_, was = start(stub, data, claims=SlotClaims()), data.with_clones()
    round_.begin(data.slots)
    with pytest.raises(LifetimeError, match=r"slots by row: the round began with \{0: 4, 1: 1\}"):
        verify(round_, data, 0, slots=torch.tensor([1, 4]))
    for layer in range(LAYERS):
        verify(round_, data, layer)
    with pytest.raises(
        LifetimeError, match=r"began with \{0: 4, 1: 1\}, and now has \{0: 4, 1: 2\}"
    ):
        round_.commit(torch.tensor([4, 2]), LAST)
    with pytest.raises(LifetimeError, match=r"track_slots: slots \[1\] have uncommitted"):
        round_.commit(
            data.slots, LAST, track_slots=torch.tensor([1, 0]), track_node=torch.tensor([0, 0])
        )
    assert unchanged(data, was)


@pytest.mark.parametrize("pool", ["state", "conv_state"])
def test_a_slot_written_between_verify_and_commit_is_noticed(
    stub: ModuleType, data: Data, pool: str
) -> None:
    round_ = start(stub, data, claims=SlotClaims())
    verify_all(round_, data)
    getattr(data, pool)[:, 3] += 1.0  # a slot of nobody
    was = data.with_clones()
    held = getattr(data, pool)[1, 4].flatten()
    kept = held[0].clone()
    held[0] += 1.0
    with pytest.raises(LifetimeError, match="slot 4 was written since it was verified"):
        round_.commit(data.slots, LAST)
    held[0] = kept
    assert unchanged(data, was)
    round_.commit(data.slots, LAST)


@pytest.mark.parametrize("slots", [None, torch.zeros(2), torch.zeros(1, 2).long()])
def test_slots_of_begin_are_numbers_in_a_row(stub: ModuleType, data: Data, slots: Any) -> None:
    with pytest.raises(ValueError, match="slots: expected"):
        start(stub, data).begin(slots)

"""Three lifetimes, three types: committed states, a round's factors, one layer's scratch.

    CanonicalState  until the engine frees a slot    verify reads it, commit alone writes it
    RoundFactors    from verify to acceptance        verify writes them, commit reads them
    Scratch         one layer's verify               the next layer writes over it

A Round (rounds.py) says which call may come next; SlotClaims, its checked mode, know which slots
have factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bolegen_runtime.arguments import INTEGERS, expect_kind, expect_tensor, expect_whole

__all__ = [
    "OF_LAYERS",
    "CanonicalState",
    "LayerWeights",
    "LifetimeError",
    "RoundFactors",
    "Scratch",
    "SlotClaims",
    "split_factors",
    "sum_bits",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# factors that each layer has its own of
OF_LAYERS = ("rows", "window_keys", "kept", "gates", "rates", "keys", "u")
_UNTIL_ACCEPTANCE = (*OF_LAYERS, "live", "parents")


class LifetimeError(RuntimeError):
    """A call out of turn: its factors are not there, are used up, or belong to another state."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's constants: conv_weight [C, W], A_log and dt_bias [Hv], conv_bias [C], D [Hv].

    None is what the mixer does not have, and a bias or a skip that the layer does without. Graphs
    read them where they are: change them in place or not at all.
    """

    conv_weight: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    conv_bias: torch.Tensor | None = None
    D: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, torch.Tensor]:
        """Those that verify may be called without."""
        known = {"conv_bias": self.conv_bias, "D": self.D}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True, eq=False)
class CanonicalState:
    """The engine's pools of committed states: state [L, slots, Hv, d_v, d_k], conv_state
    [L, slots, C, W-1], or None where the engine has a convolution of its own.
    """

    state: torch.Tensor
    conv_state: torch.Tensor | None

    def __post_init__(self) -> None:
        expect_tensor("state", self.state, (None,) * 5, _FLOATS, None)
        if self.conv_state is not None:
            shape = (*self.state.shape[:2], None, None)
            expect_tensor("conv_state", self.conv_state, shape, _FLOATS, self.state.device)

    @property
    def layers(self) -> int:
        """L."""
        return self.state.shape[0]

    def checksum(self, slot: int) -> int:
        """A number of the bits that all layers hold in one slot. Waits for the device."""
        slot = expect_whole("slot", slot, 0, self.state.shape[1] - 1)
        if self.state.is_meta:
            raise ValueError("state: expected contents, got a tensor on meta")
        pools = [self.state] if self.conv_state is None else [self.state, self.conv_state]
        return sum((i + 1) * sum_bits(pool[:, slot]) for i, pool in enumerate(pools))


def sum_bits(held: torch.Tensor) -> int:
    """A number of a tensor's bits and of where they are. Waits for the device."""
    bits = held.contiguous().view({2: torch.int16, 4: torch.int32}[held.element_size()]).flatten()
    places = 2 * torch.arange(len(bits), device=bits.device) + 1
    return int((bits * places).sum())


@dataclass(frozen=True, eq=False)
class RoundFactors:
    """Tensors by name that verify leaves for commit."""

    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Scratch:
    """Tensors by name that verify of one layer uses, and commit does not read.

    The next layer writes over all of them but the topology: traced (``ancestors``), which the
    layers of one graph share, or a static tree's own (``tree``), which nothing writes.
    """

    tensors: Mapping[str, torch.Tensor]


def split_factors(factors: Any) -> tuple[RoundFactors, Scratch]:
    """What a module's ``allocate`` gave, by lifetime: the same tensors, not copies.

    Raises ValueError where the module itself counts other bytes to a lifetime.
    """
    if not hasattr(factors, "round_bytes"):
        raise ValueError(
            f"factors: expected those of a module's allocate(), got {type(factors).__name__}"
        )
    tensors = {name: t for name, t in vars(factors).items() if isinstance(t, torch.Tensor)}
    kept = {name: tensors.pop(name) for name in _UNTIL_ACCEPTANCE if name in tensors}
    for what, group, said in (
        ("factors", kept, factors.round_bytes),
        ("scratch", tensors, factors.scratch_bytes),
    ):
        found = sum(t.numel() * t.element_size() for t in group.values())
        if found != said:
            raise ValueError(
                f"factors: expected {said} bytes of {what} as the module says, got {found} in "
                f"{', '.join(group)}; the module is of another version than bolegen_runtime"
            )
    return RoundFactors(kept), Scratch(tensors)


@dataclass(frozen=True, eq=False)
class SlotClaims:
    """The slots that have uncommitted factors, and the bits they held when those were made.

    The checked mode of rounds: give one to all rounds and graph pools over the same states.
    """

    # slot -> the round, the slot's row in it, and a checksum
    _held: dict[int, tuple[object, int, int]] = field(default_factory=dict)
    # what was allocated for factors, by id -> the round that has it
    _factors: dict[int, object] = field(default_factory=dict)

    def take(
        self, owner: object, canonical: CanonicalState, slots: torch.Tensor, factors: object
    ) -> None:
        """Claim factors, and a slot for each row. LifetimeError, and nothing claimed, where one is
        taken. Raises ValueError for an argument.
        """
        expect_kind("canonical", canonical, CanonicalState)
        expect_tensor("slots", slots, (None,), INTEGERS, canonical.state.device)
        rows = _used(slots)
        used = list(rows.values())
        self.check_factors(None, factors)
        for slot in used:
            if slot >= canonical.state.shape[1]:
                raise LifetimeError(
                    f"slots: expected below {canonical.state.shape[1]}, got {slot}"
                )
            if slot in self._held:
                raise LifetimeError(
                    f"slot {slot} has uncommitted factors of another round; commit or discard "
                    "that round first"
                )
            if used.count(slot) > 1:
                raise LifetimeError(f"slot {slot} is in two rows, which would both commit to it")
        self._held.update(
            {slot: (owner, row, canonical.checksum(slot)) for row, slot in rows.items()}
        )
        self._factors[id(factors)] = owner

    def check_factors(self, owner: object | None, factors: object) -> None:
        """Raise LifetimeError where factors are held by another round than ``owner``."""
        if self._factors.get(id(factors), owner) is not owner:
            raise LifetimeError(
                "these factors hold another round that is not committed; commit or discard that "
                "round first, or give each round factors of its own"
            )

    def check_slots(self, owner: object, slots: torch.Tensor) -> None:
        """Raise LifetimeError unless these are the round's slots, each in its row."""
        mine, now = self._of(owner), _used(slots)
        if now != mine:
            raise LifetimeError(f"slots by row: the round began with {mine}, and now has {now}")

    def check_bits(self, owner: object, canonical: CanonicalState) -> None:
        """Raise LifetimeError where the round's slots are not as they were."""
        expect_kind("canonical", canonical, CanonicalState)
        for slot in self._of(owner).values():
            if canonical.checksum(slot) != self._held[slot][2]:
                raise LifetimeError(
                    f"slot {slot} was written since it was verified, so its factors do not "
                    "apply any more; discard the round and verify again"
                )

    def check_tracks(self, track_slots: torch.Tensor) -> None:
        """Raise LifetimeError where a slot to be written has uncommitted factors."""
        used = _used(track_slots, "track_slots").values()
        taken = sorted({slot for slot in used if slot in self._held})
        if taken:
            raise LifetimeError(
                f"track_slots: slots {taken} have uncommitted factors, which a write would spoil"
            )

    def renew(self, owner: object, canonical: CanonicalState) -> None:
        """Take the round's slots as they are now: its own verify has written them."""
        expect_kind("canonical", canonical, CanonicalState)
        for row, slot in self._of(owner).items():
            self._held[slot] = owner, row, canonical.checksum(slot)

    def release(self, owner: object) -> None:
        """Give back the factors and all slots of a round."""
        for slot in self._of(owner).values():
            del self._held[slot]
        for key in [key for key, of in self._factors.items() if of is owner]:
            del self._factors[key]

    def _of(self, owner: object) -> dict[int, int]:
        """The round's slots by row."""
        return {row: slot for slot, (of, row, _) in self._held.items() if of is owner}


def _used(slots: torch.Tensor, name: str = "slots") -> dict[int, int]:
    """Slots by row, padded rows left out."""
    expect_tensor(name, slots, (None,), INTEGERS, None)
    if slots.is_meta:
        raise ValueError(f"{name}: expected contents, got a tensor on meta")
    return {row: slot for row, slot in enumerate(slots.tolist()) if slot >= 0}

"""A folded round between its acceptance and the verify that writes it into the slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime.lifetimes import OF_LAYERS, CanonicalState, LifetimeError

__all__ = ["Pending"]


@dataclass(frozen=True, eq=False)
class Pending:
    """An accepted round: its factors, the accepted nodes [B], and the layers that lack it."""

    factors: Any
    last_node: torch.Tensor
    layers: set[int]

    def options_at(self, layer: int) -> dict[str, Any]:
        """What verify of a layer is given, to commit it first."""
        return {"pending": (self.factors, self.last_node)} if layer in self.layers else {}

    def write(
        self,
        module: ModuleType,
        known: CanonicalState,
        slots: torch.Tensor,
        track_slots: torch.Tensor | None,
        track_node: torch.Tensor | None,
    ) -> None:
        """The module's flush, of the layers that lack it."""
        parts = [(self.factors, slice(0, known.layers))]
        if len(self.layers) < known.layers:
            if track_slots is not None:
                raise LifetimeError("track_slots: some layers are past the tracked node already")
            parts = [(_take_layer(self.factors, i), slice(i, i + 1)) for i in sorted(self.layers)]
        for part, layers in parts:
            module.flush(
                part, known.state[layers],
                None if known.conv_state is None else known.conv_state[layers], slots,
                self.last_node, track_slots=track_slots, track_node=track_node,
            )  # fmt: skip
            self.layers.difference_update(range(known.layers)[layers])


def _take_layer(factors: Any, layer: int) -> Any:
    """The factors of one layer alone: views."""
    held = {name: t for name, t in vars(factors).items() if name in OF_LAYERS}
    return replace(factors, **{n: t[layer : layer + 1] for n, t in held.items() if t is not None})

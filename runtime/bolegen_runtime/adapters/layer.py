"""What every family's adapter does: one layer's rows to verify, its output back, and its cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from bolegen_runtime.lifetimes import LayerWeights

__all__ = ["Adapter", "AdapterError", "Rows", "expect_silu"]


class AdapterError(ValueError):
    """A token mixer, or a cache, that no adapter takes as it is."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A layer's projections, one row a node: x [B, T, C], a and b [B, T, Hv] as verify takes them,
    a [B, T, Hv, dk] where each key channel decays by itself.

    ``gate`` is what ``finish`` multiplies the output with, in whichever form the family has it.
    None where the mixer has no such operand.
    """

    x: Tensor
    a: Tensor | None
    b: Tensor | None
    gate: Tensor


@dataclass(frozen=True, eq=False)
class Adapter(ABC):
    """One recurrent layer: ``token_mixer`` is transformers' module, whose weights are used.

    Raises AdapterError for a configuration that bolegen does not compute, by the field's name.
    """

    token_mixer: Any
    models: ClassVar[str]  # for documents and errors

    def __post_init__(self) -> None:
        self.expect_supported()

    @staticmethod
    @abstractmethod
    def recognises(token_mixer: Any) -> bool:
        """Whether a module has this family's attributes."""

    @abstractmethod
    def expect_supported(self) -> None:
        """Raises AdapterError where the configuration is not supported."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """mixer, heads, dims and conv, as ``bolegen_runtime.load`` takes them."""

    @property
    @abstractmethod
    def constants(self) -> LayerWeights:
        """The layer's weights, where they are now: views of the model's own where they can be;
        dt_bias [Hv, dk] where each key channel decays by itself.
        """

    @abstractmethod
    def project(self, hidden: Tensor) -> Rows:
        """Rows of hidden [B, T, hidden], the token mixer's own input."""

    @abstractmethod
    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate, norm and project verify's out [B, T, Hv, dv]: the token mixer's [B, T, hidden]."""

    def verify(
        self,
        module: ModuleType,
        hidden: Tensor,
        state: Tensor,
        conv_state: Tensor | None,
        slots: Tensor,
        factors: Any,
        **options: Any,
    ) -> Tensor:
        """The whole token mixer over a tree's nodes, [B, T, hidden] to [B, T, hidden].

        ``module`` was loaded for ``shapes``; ``state`` and ``conv_state`` are this layer's pools,
        and ``options`` (layer, parents, live, ...) those of the module's verify.
        """
        rows, own = self.project(hidden), self.constants
        out = module.verify(
            rows.x, rows.a, rows.b, own.conv_weight, own.A_log, own.dt_bias, state, conv_state,
            slots, factors, **own.options, **options,
        )  # fmt: skip
        return self.finish(out, rows.gate)

    def import_cache(
        self, cache: Any, state: Tensor, conv_state: Tensor | None, slots: Tensor
    ) -> None:
        """Copy this layer's states of a transformers cache into the pools' slots, row by row.

        cache: one that a forward has filled, B rows. state [slots, Hv, dv, dk], conv_state
        [slots, C, W-1] or None, slots [B]; rows whose slot is negative are left out.
        """
        rows = slots >= 0
        kept, window = self._cached(cache)
        state[slots[rows]] = self._to_pool(kept)[rows].to(state.dtype)
        if window is not None and conv_state is not None:
            width = conv_state.shape[-1]
            conv_state[slots[rows]] = window[rows][..., -width:].to(conv_state.dtype)

    def export_cache(
        self, cache: Any, state: Tensor, conv_state: Tensor | None, slots: Tensor
    ) -> None:
        """Write the pools' slots into the cache that ``import_cache`` has read, in place."""
        rows = slots >= 0
        kept, window = self._cached(cache)
        self._to_pool(kept)[rows] = state[slots[rows]].to(kept.dtype)
        if window is not None and conv_state is not None:
            width = conv_state.shape[-1]
            # the columns before the window take part in no later token
            window[rows] = 0
            window[..., -width:][rows] = conv_state[slots[rows]].to(window.dtype)

    def _cached(self, cache: Any) -> tuple[Tensor, Tensor | None]:
        """The cache's own tensors: the state, and the window [B, C, W], oldest first."""
        index = self.token_mixer.layer_idx
        entry = cache.layers[index] if index < len(cache.layers) else None
        kept, window = (
            getattr(entry, name, {}).get(0) for name in ("recurrent_states", "conv_states")
        )
        if kept is None or window is None:
            raise AdapterError(f"cache: layer {index} holds no state; run the prompt first")
        if getattr(entry, "record_past", False):
            raise AdapterError(
                f"cache: layer {index} records past states; make it without "
                "activate_past_recording"
            )
        return kept, window

    def _to_pool(self, kept: Tensor) -> Tensor:
        """A view of the cached state as [B, Hv, dv, dk]; transformers has [B, Hv, dk, dv]."""
        return kept.mT


def expect_silu(token_mixer: Any, field: str) -> None:
    """Raises AdapterError unless the convolution's activation is SiLU."""
    if token_mixer.activation not in ("silu", "swish"):
        raise AdapterError(
            f"{field}: expected silu after the convolution, got {token_mixer.activation!r}"
        )

"""Lightning attention: MiniMax-Text-01 and M1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bolegen_runtime.adapters.layer import Adapter, AdapterError, Rows
from bolegen_runtime.lifetimes import LayerWeights

__all__ = ["Lightning"]


@dataclass(frozen=True, eq=False)
class Lightning(Adapter):
    """Decays constant a head; A_log is the logarithm of the layer's slopes."""

    models: ClassVar[str] = "MiniMax-Text-01, MiniMax-M1"

    @staticmethod
    def recognises(token_mixer: Any) -> bool:
        """By its slopes."""
        names = ("slope_rate", "qkv_proj", "output_gate", "num_attention_heads")
        return all(hasattr(token_mixer, name) for name in names)

    def expect_supported(self) -> None:
        """Any activation: the model's own is applied to its rows."""

    @property
    def shapes(self) -> dict[str, Any]:
        """lightning."""
        heads, size = self.token_mixer.num_attention_heads, self.token_mixer.head_dim
        return {"mixer": "lightning", "heads": (heads, heads), "dims": (size, size), "conv": 1}

    @property
    def constants(self) -> LayerWeights:
        """A_log in float32."""
        slopes = self.token_mixer.slope_rate.flatten().float()
        return LayerWeights(None, slopes.log(), None)

    def project(self, hidden: Tensor) -> Rows:
        """One product after its activation, heads sorted apart into q|k|v, and the gate."""
        of = self.token_mixer
        mixed = of.act_fn(of.qkv_proj(hidden)).unflatten(-1, (of.num_attention_heads, 3, -1))
        x = mixed.transpose(-3, -2).flatten(-3)
        return Rows(x, None, None, torch.sigmoid(of.output_gate(hidden)))

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The norm over all heads, the gate [B, T, Hv dv], the projection."""
        projected: Tensor = self.token_mixer.out_proj(gate * self.token_mixer.norm(out.flatten(2)))
        return projected

    def _cached(self, cache: Any) -> tuple[Tensor, None]:
        index = self.token_mixer.layer_idx
        known = getattr(cache, "linear_cache", [])
        # MiniMax's cache has an empty list for what is not there
        if index >= len(known) or not isinstance(known[index], Tensor):
            raise AdapterError(f"cache: layer {index} holds no state; run the prompt first")
        return known[index], None

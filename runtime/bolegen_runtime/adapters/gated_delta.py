"""Gated DeltaNet layers: Qwen3-Next, Qwen3.5 and OLMo-Hybrid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bolegen_runtime.adapters.layer import Adapter, Rows, expect_silu
from bolegen_runtime.lifetimes import LayerWeights

__all__ = ["OlmoHybrid", "Qwen3Next", "Qwen35"]


@dataclass(frozen=True, eq=False)
class GatedDelta(Adapter):
    """What the three have in common; they differ in their projections."""

    def expect_supported(self) -> None:
        """SiLU after the convolution."""
        expect_silu(self.token_mixer, "hidden_act")

    @property
    def shapes(self) -> dict[str, Any]:
        """gdn, or gdn_neg where write gates reach 2."""
        of = self.token_mixer
        return {
            "mixer": "gdn_neg" if getattr(of, "allow_neg_eigval", False) else "gdn",
            "heads": (of.num_k_heads, of.num_v_heads),
            "dims": (of.head_k_dim, of.head_v_dim),
            "conv": of.conv_kernel_size,
        }

    @property
    def constants(self) -> LayerWeights:
        """Views of the layer's parameters."""
        of = self.token_mixer
        return LayerWeights(of.conv1d.weight[:, 0], of.A_log, of.dt_bias, of.conv1d.bias)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The gated norm over d_v, then the output projection; gate [B, T, Hv, dv] or flat."""
        norm, project = self._writers
        size = out.shape[-1]
        rows = norm(out.reshape(-1, size), gate.reshape(-1, size))
        projected: Tensor = project(rows.view(*out.shape[:2], -1))
        return projected

    @property
    def _writers(self) -> tuple[Any, Any]:
        """The gated norm and the output projection."""
        return self.token_mixer.norm, self.token_mixer.out_proj


@dataclass(frozen=True, eq=False)
class Qwen35(GatedDelta):
    """Qwen3.5: q|k|v, z, a and b projected apart."""

    models: ClassVar[str] = "Qwen3.5 and its mixture of experts"

    @staticmethod
    def recognises(token_mixer: Any) -> bool:
        """By its four projections."""
        names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log")
        return all(hasattr(token_mixer, name) for name in names)

    def project(self, hidden: Tensor) -> Rows:
        """Four products."""
        of = self.token_mixer
        return Rows(
            of.in_proj_qkv(hidden), of.in_proj_a(hidden), of.in_proj_b(hidden),
            of.in_proj_z(hidden),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Qwen3Next(GatedDelta):
    """Qwen3-Next: q|k|v|z and b|a interleaved, each key head with its value heads."""

    models: ClassVar[str] = "Qwen3-Next"

    @staticmethod
    def recognises(token_mixer: Any) -> bool:
        """By its two interleaved projections."""
        names = ("in_proj_qkvz", "in_proj_ba", "conv1d", "A_log")
        return all(hasattr(token_mixer, name) for name in names)

    def project(self, hidden: Tensor) -> Rows:
        """Two products, sorted apart."""
        of = self.token_mixer
        keys, ratio = of.num_k_heads, of.num_v_heads // of.num_k_heads
        values = ratio * of.head_v_dim
        mixed = of.in_proj_qkvz(hidden).unflatten(-1, (keys, -1))
        *qkv, z = mixed.split([of.head_k_dim, of.head_k_dim, values, values], -1)
        b, a = of.in_proj_ba(hidden).unflatten(-1, (keys, -1)).split(ratio, -1)
        x = torch.cat([part.flatten(2) for part in qkv], -1)
        return Rows(x, a.flatten(2), b.flatten(2), z.flatten(2))


@dataclass(frozen=True, eq=False)
class OlmoHybrid(GatedDelta):
    """OLMo-Hybrid: all projected apart; write gates to 2 with linear_allow_neg_eigval."""

    models: ClassVar[str] = "OLMo-Hybrid"

    @staticmethod
    def recognises(token_mixer: Any) -> bool:
        """By its own flag, and by one convolution over q|k|v."""
        names = ("allow_neg_eigval", "q_proj", "g_proj", "conv1d", "A_log")
        return all(hasattr(token_mixer, name) for name in names)

    def project(self, hidden: Tensor) -> Rows:
        """Six products."""
        of = self.token_mixer
        x = torch.cat([of.q_proj(hidden), of.k_proj(hidden), of.v_proj(hidden)], -1)
        return Rows(x, of.a_proj(hidden), of.b_proj(hidden), of.g_proj(hidden))

    @property
    def _writers(self) -> tuple[Any, Any]:
        return self.token_mixer.o_norm, self.token_mixer.o_proj

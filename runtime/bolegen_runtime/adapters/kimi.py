"""Kimi Delta Attention layers: Kimi-Linear, GLM-5.3-Flash and Ling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bolegen_runtime.adapters.layer import Adapter, AdapterError, Rows, expect_silu
from bolegen_runtime.lifetimes import LayerWeights

__all__ = ["Kimi"]

BOUND = -5.0  # of the log decays that kda_bounded knows


@dataclass(frozen=True, eq=False)
class Kimi(Adapter):
    """A decay per key channel: q, k and v projected apart, log decays by way of a forget gate."""

    models: ClassVar[str] = "Kimi-Linear, GLM-5.3-Flash, Ling with Kimi Delta Attention"

    @staticmethod
    def recognises(token_mixer: Any) -> bool:
        """By its forget gate, and by one convolution over q|k|v."""
        names = ("forget_gate", "q_proj", "b_proj", "o_norm", "conv1d")
        return all(hasattr(token_mixer, name) for name in names)

    def expect_supported(self) -> None:
        """SiLU after the convolution; log decays without a bound, or with that of kda_bounded."""
        expect_silu(self.token_mixer, "hidden_act")
        field, bound = self._bound
        if bound not in (None, BOUND):
            raise AdapterError(f"{field}: expected {BOUND:g} or none, got {bound!r}")

    @property
    def shapes(self) -> dict[str, Any]:
        """kda, or kda_bounded where log decays end at -5."""
        of = self.token_mixer
        return {
            "mixer": "kda" if self._bound[1] is None else "kda_bounded",
            "heads": (of.num_heads, of.num_heads),
            "dims": (of.head_dim, of.head_dim),
            "conv": of.conv_kernel_size,
        }

    @property
    def constants(self) -> LayerWeights:
        """Views of the layer's parameters; A_log [H], dt_bias [H, dk]."""
        of, gate = self.token_mixer, self.token_mixer.forget_gate
        return LayerWeights(
            of.conv1d.weight[:, 0], gate.A_log.view(-1),
            gate.dt_bias.view(of.num_heads, of.head_dim), of.conv1d.bias,
        )  # fmt: skip

    def project(self, hidden: Tensor) -> Rows:
        """Rows q|k|v; a [B, T, H, dk] is what the forget gate adds its bias to."""
        of, forget = self.token_mixer, self.token_mixer.forget_gate
        x = torch.cat([of.q_proj(hidden), of.k_proj(hidden), of.v_proj(hidden)], -1)
        a = _project(forget, "f", hidden).view(*hidden.shape[:2], of.num_heads, of.head_dim)
        return Rows(x, a, of.b_proj(hidden), _project(of, "g", hidden))

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The gated norm over d_v, then the output projection; gate [B, T, H dv]."""
        of = self.token_mixer
        rows = of.o_norm(out, gate.view(out.shape))
        projected: Tensor = of.o_proj(rows.flatten(2))
        return projected

    @property
    def _bound(self) -> tuple[str, float | None]:
        """The configuration's field for the lower bound of log decays, and what it says."""
        gate = self.token_mixer.forget_gate
        if hasattr(gate, "safe_gate"):
            return "kda_lower_bound", gate.lower_bound if gate.safe_gate else None
        return "linear_lower_bound", getattr(gate, "safe_gate_lower_bound", None)


def _project(of: Any, name: str, hidden: Tensor) -> Tensor:
    """By one matrix, or by two of low rank."""
    if hasattr(of, f"{name}_proj"):
        whole: Tensor = getattr(of, f"{name}_proj")(hidden)
        return whole
    low: Tensor = getattr(of, f"{name}_b_proj")(getattr(of, f"{name}_a_proj")(hidden))
    return low

"""Mamba2 layers: Mamba2, Bamba, Zamba2, Nemotron-H, Granite-4.0-H and Falcon-H1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from bolegen_runtime.adapters.layer import Adapter, AdapterError, Rows, expect_silu
from bolegen_runtime.lifetimes import LayerWeights

__all__ = ["Mamba2"]


@dataclass(frozen=True, eq=False)
class Mamba2(Adapter):
    """Key heads are groups, d_k the state size, d_v the head dimension, a is dt, rows are x|B|C.

    Falcon-H1's multipliers are applied; gated norms of either order, and none, are the model's.
    """

    models: ClassVar[str] = "Mamba2, Bamba, Zamba2, Nemotron-H, Granite-4.0-H, Falcon-H1"

    @staticmethod
    def recognises(token_mixer: Any) -> bool:
        """By groups and heads, which the first Mamba has not."""
        names = ("ssm_state_size", "n_groups", "num_heads", "time_step_limit", "in_proj", "D")
        return all(hasattr(token_mixer, name) for name in names)

    def expect_supported(self) -> None:
        """SiLU, no limits of the time step, one D a head, and Falcon-H1's multipliers there."""
        of = self.token_mixer
        expect_silu(of, "hidden_act (mamba_hidden_act in Nemotron-H)")
        _expect_no_limit(of)
        if tuple(of.D.shape) != (of.num_heads,):
            raise AdapterError(f"D: expected one a head, ({of.num_heads},), got {(*of.D.shape,)}")
        if hasattr(of, "ssm_in_multiplier") and not hasattr(of, "mup_vector"):
            raise AdapterError(
                "ssm_multipliers: expected the layer's mup_vector, which FalconH1Model gives it; "
                "adapt the layers of a whole model"
            )

    @property
    def shapes(self) -> dict[str, Any]:
        """mamba2."""
        of = self.token_mixer
        return {
            "mixer": "mamba2",
            "heads": (of.n_groups, of.num_heads),
            "dims": (of.ssm_state_size, of.head_dim),
            "conv": of.conv_kernel_size,
        }

    @property
    def constants(self) -> LayerWeights:
        """Views of the layer's parameters."""
        of = self.token_mixer
        return LayerWeights(of.conv1d.weight[:, 0], of.A_log, of.dt_bias, of.conv1d.bias, of.D)

    def project(self, hidden: Tensor) -> Rows:
        """One product, cut into views: the gate, x|B|C and dt."""
        of = self.token_mixer
        scaled = hasattr(of, "ssm_in_multiplier")
        rows = of.in_proj(hidden * of.ssm_in_multiplier if scaled else hidden)
        if scaled:
            rows = rows * of.mup_vector
        gate, x, a = rows.split([of.intermediate_size, of.conv_dim, of.num_heads], -1)
        return Rows(x, a, None, gate)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The model's gated norm over the heads, gate [B, T, Hv dv], then the projection."""
        of, rows = self.token_mixer, out.flatten(2)
        gated = getattr(of, "mamba_rms_norm", True)
        rows = of.norm(rows, gate) if gated else rows * functional.silu(gate)
        projected: Tensor = of.out_proj(rows.to(out.dtype))
        return projected

    def _to_pool(self, kept: Tensor) -> Tensor:
        return kept


def _expect_no_limit(token_mixer: Any) -> None:
    """Raises AdapterError for limits of dt that decoding would not apply.

    transformers clamps dt to its limits in a prompt and never in a decode step, which is what
    verify stands for. Nemotron-H and Zamba2 take the lower limit from time_step_min, a range for
    fresh weights: that one is let pass, others would change what the model is.
    """
    limits, config = token_mixer.time_step_limit, getattr(token_mixer, "config", None)
    if limits is not None and limits[0] == getattr(config, "time_step_min", None):
        limits = getattr(config, "time_step_limit", (0.0, math.inf))
    if limits is None or limits[0] > 0 or limits[1] != math.inf:
        raise AdapterError(
            f"time_step_limit: expected (0, inf), got {limits}; verify clamps no time step, as "
            "transformers' decode step does not, though its prompts do"
        )

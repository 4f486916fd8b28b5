# mypy: allow-untyped-calls
"""Qwen3.5-9B's text model as transformers makes it from a configuration, with random weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

__all__ = ["build_model", "configure", "fuse_norms"]


def configure(**changes: Any) -> Qwen3_5TextConfig:
    """Qwen3.5-9B's text configuration as published, but for ``changes``."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    fields: dict[str, Any] = {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": rope,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }
    return Qwen3_5TextConfig(**(fields | changes))


def build_model(config: Qwen3_5TextConfig, *, device: str, dtype: torch.dtype) -> Any:
    """transformers' causal model of this configuration, its random weights made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def fuse_norms(model: Any) -> Any:
    """The same model with torch's RMS norm, one launch, where transformers' own takes ten.

    Changes the model in place. Weights that are stored around zero become 1 + weight, rounded to
    their dtype: exact for fresh ones, which are zero.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, qwen.Qwen3_5RMSNorm):
                setattr(parent, name, _hold(nn.RMSNorm, 1 + norm.weight, norm.eps))
            elif isinstance(norm, qwen.Qwen3_5RMSNormGated):
                setattr(parent, name, _hold(_GatedNorm, norm.weight, norm.variance_epsilon))
    return model


class _GatedNorm(nn.RMSNorm):
    """What follows the recurrence: rows [N, dv], normed, times the SiLU of their gates."""

    def forward(self, rows: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        normed: Tensor = super().forward(rows)
        return normed * functional.silu(gate)


def _hold(kind: type[nn.RMSNorm], weight: Tensor, eps: float) -> nn.RMSNorm:
    norm = kind(weight.shape[0], eps=eps, device="meta")
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm

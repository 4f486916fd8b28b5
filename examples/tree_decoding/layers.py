"""Qwen3.5's decoder layers, cut open around the token mixer.

transformers owns the weights and the exact formulas of norms, gates and rotary
embedding; what mixes tokens (causal attention, tree attention, the delta rule, a
generated bolegen module) is passed in. Training, the target's tree pass and the draft
head share these functions; bolegen_runtime.adapters cuts the recurrent mixers open.
"""
# mypy: allow-untyped-calls

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

__all__ = [
    "AttentionRows",
    "KeyValues",
    "Rope",
    "apply_layer",
    "attention_output",
    "attention_rows",
    "is_recurrent",
]

Rope = tuple[Tensor, Tensor]


class AttentionRows(NamedTuple):
    """Projections of a full-attention layer; q and k are normalised and rotated."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, D]
    gate: Tensor  # [B, T, H D], the output gate before its sigmoid


class KeyValues:
    """Keys and values of one attention layer: committed rows first, this round's behind them."""

    def __init__(self, heads: int, size: int, capacity: int, like: Tensor) -> None:
        self.keys = like.new_zeros(1, heads, capacity, size)
        self.values = torch.zeros_like(self.keys)

    def append(self, at: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows [1, Hkv, T, D] from row ``at`` on; returns views of all rows so far."""
        end = at + keys.shape[2]
        self.keys[:, :, at:end] = keys
        self.values[:, :, at:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, at: int, rows: Tensor) -> None:
        """Move rows at + ``rows`` (increasing) together, to row ``at`` and on."""
        for pool in (self.keys, self.values):
            pool[:, :, at : at + len(rows)] = pool[:, :, at + rows]


def is_recurrent(layer: Any) -> bool:
    """Whether a decoder layer mixes tokens by Gated DeltaNet rather than by attention."""
    return hasattr(layer, "linear_attn")


def apply_layer(layer: Any, x: Tensor, mix: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """One decoder layer on x [B, T, hidden]; ``mix(mixer, rows)`` replaces its token mixer."""
    mixer: nn.Module = layer.linear_attn if is_recurrent(layer) else layer.self_attn
    x = x + mix(mixer, layer.input_layernorm(x))
    mlp: Tensor = layer.mlp(layer.post_attention_layernorm(x))
    return x + mlp


def attention_rows(mixer: Any, x: Tensor, rope: Rope) -> AttentionRows:
    """Project normalised rows x [B, T, hidden] for attention; rope = (cos, sin) [B, T, .]."""
    heads = (*x.shape[:2], -1, mixer.head_dim)
    q, gate = mixer.q_proj(x).view(*x.shape[:2], -1, 2 * mixer.head_dim).chunk(2, -1)
    q = mixer.q_norm(q).transpose(1, 2)
    k = mixer.k_norm(mixer.k_proj(x).view(heads)).transpose(1, 2)
    v = mixer.v_proj(x).view(heads).transpose(1, 2)
    q, k = qwen.apply_rotary_pos_emb(q, k, *rope)
    return AttentionRows(q, k, v, gate.flatten(2))


def attention_output(
    mixer: Any, rows: AttentionRows, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Attend from rows to keys, values [B, Hkv, N, D]; returns [B, T, hidden].

    mask: [T, N] bool, True where a row may look; None = causal over N = T rows.
    """
    out = functional.scaled_dot_product_attention(
        rows.q,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=mixer.scaling,
        enable_gqa=True,
    )
    out = out.transpose(1, 2).flatten(2) * torch.sigmoid(rows.gate)
    projected: Tensor = mixer.o_proj(out)
    return projected

"""Fresh weights, and whole sequences in plain, differentiable torch: what training needs.

Decoding never comes here: it runs transformers' own forward or the tree pass of target.py.
"""
# mypy: allow-untyped-calls

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bolegen_runtime.adapters import adapt

from . import layers
from .model import Model

__all__ = ["CHUNK", "initialise", "run_drafts", "run_target"]

CHUNK = 64


def initialise(model: Model) -> None:
    """Fresh weights: fan-in scaled, residual writers smaller, decays over many time scales."""
    depth = model.config.num_hidden_layers
    for part in (model.target, model.head):
        for name, weight in part.named_parameters():
            if name.endswith("A_log"):
                weight.data.uniform_(1, 16).log_()
            elif name.endswith("dt_bias"):
                step = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(0.1)).exp()
                weight.data.copy_(step + torch.log(-torch.expm1(-step)))  # softplus inverted
            elif "embed_tokens" in name or "lm_head" in name:
                weight.data.normal_(0, 0.02)
            elif name.endswith("conv1d.weight"):
                weight.data.normal_(0, 0.5)
            elif weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                weight.data.normal_(0, (weight.shape[1] * (2 * depth if residual else 1)) ** -0.5)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule by chunks from a zero state, differentiable, in float32.

    q, k: [B, H, T, dk] normalised; v: [B, H, T, dv]; g (natural log of the decay), beta:
    [B, H, T]. T is a multiple of CHUNK. Within a chunk (I + A) U = beta (V - decayed K S).
    """
    q, k, v, g, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    ratio = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    decay, remain = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    written = beta[..., None] * k
    a = (written @ k.mT * ratio).tril(-1)
    right = torch.cat([beta[..., None] * v, written * decay], -1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    fresh, stale = solved.split([v.shape[-1], k.shape[-1]], -1)
    within, q, k = q @ k.mT * ratio, q * decay, (k * remain).mT
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        u = fresh[:, :, i] - stale[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + within[:, :, i] @ u)
        state = state * decay[:, :, i, -1:] + k[:, :, i] @ u
    return torch.cat(outputs, 2)


def mix_delta(mixer: Any, x: Tensor) -> Tensor:
    """A Gated DeltaNet layer's token mixer over whole sequences x [B, T, hidden]."""
    adapter = adapt(mixer)
    rows: Any = adapter.project(x)
    width = mixer.conv_kernel_size
    padded = functional.pad(rows.x.mT, (width - 1, 0))
    qkv = functional.silu(
        functional.conv1d(padded, mixer.conv1d.weight.to(x.dtype), groups=mixer.conv_dim)
    ).mT
    with torch.autocast(x.device.type, enabled=False):
        q, k, v = qkv.float().split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
        q, k = (h.unflatten(-1, (mixer.num_k_heads, -1)).transpose(1, 2) for h in (q, k))
        q, k = (h * torch.rsqrt(h.square().sum(-1, keepdim=True) + 1e-6) for h in (q, k))
        share = mixer.num_v_heads // mixer.num_k_heads
        q, k = (h.repeat_interleave(share, 1) for h in (q * mixer.head_k_dim**-0.5, k))
        v = v.unflatten(-1, (mixer.num_v_heads, -1)).transpose(1, 2)
        g = -mixer.A_log.exp() * functional.softplus(rows.a.float() + mixer.dt_bias)
        out = delta_rule(q, k, v, g.mT, rows.b.float().sigmoid().mT).transpose(1, 2)
    return adapter.finish(out.to(x.dtype), rows.gate)


def causal_mixer(rope: layers.Rope) -> Any:
    """The token mixer of a whole-sequence pass, for both kinds of layers."""

    def mix(mixer: Any, x: Tensor) -> Tensor:
        if hasattr(mixer, "conv1d"):
            return mix_delta(mixer, x)
        rows = layers.attention_rows(mixer, x, rope)
        return layers.attention_output(mixer, rows, rows.k, rows.v, None)

    return mix


def run_target(model: Model, ids: Tensor) -> Tensor:
    """The target's final hidden rows [B, T, hidden] for ids [B, T]."""
    x = model.embed(ids)
    mix = causal_mixer(model.rope(x, torch.arange(ids.shape[1], device=ids.device)[None]))
    for layer in model.target.model.layers:
        x = layers.apply_layer(layer, x, mix)
    hidden: Tensor = model.target.model.norm(x)
    return hidden


def run_drafts(model: Model, ids: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
    """Draft logits by step; row j of step s has read token j+s and guesses token j+s+1."""
    hidden = hidden.detach()
    for step in range(1, steps + 1):
        embeddings = model.embed(ids[:, step:]).detach()
        hidden = hidden[:, : embeddings.shape[1]]
        positions = torch.arange(step - 1, ids.shape[1] - 1, device=ids.device)[None]
        hidden = model.head(embeddings, hidden, causal_mixer(model.rope(hidden, positions)))
        yield functional.linear(hidden, model.target.lm_head.weight.detach())

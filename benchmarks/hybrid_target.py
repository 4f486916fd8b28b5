# mypy: allow-untyped-calls
"""A hybrid target with random weights in plain torch: one-token decode, and passes over trees.

Shapes are Qwen3.5-9B's: 24 Gated DeltaNet and 8 gated full-attention layers, MLPs, logits. Trees
go through generated modules and an ancestor mask, commit included; decode updates states in place
with two small kernels, as engines do. Attention reads the prefix in splits by flash attention and
merges the tree's own part by log-sum-exp. Rows of the tree are not appended to the KV cache.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.decode_kernels import decode_step
from bolegen_runtime import Pass

__all__ = ["QWEN", "HybridTarget", "Place", "TargetShape", "attend", "heap_tree"]


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5-type text model; every ``period``-th layer is full attention."""

    layers: int = 32
    period: int = 4
    hidden: int = 4096
    inner: int = 12288
    vocabulary: int = 248320
    query_heads: int = 16
    kv_heads: int = 4
    head_dim: int = 256
    rotary: int = 64
    heads: tuple[int, int] = (16, 32)
    dims: tuple[int, int] = (128, 128)
    conv: int = 4

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.heads[0] * self.dims[0] + self.heads[1] * self.dims[1]

    def is_attention(self, layer: int) -> bool:
        """Whether a layer is full attention."""
        return layer % self.period == self.period - 1


QWEN = TargetShape()


def heap_tree(nodes: int) -> list[int]:
    """Two children a node, level by level."""
    return [-1, *((node - 1) // 2 for node in range(1, nodes))]


@dataclass(frozen=True)
class Place:
    """Where a pass stands: rows, tree, positions; module: the N of any:N, None to decode."""

    context: int
    module: int | None
    slots: Tensor  # [B]
    parents: Tensor  # [B, n]
    sees: Tensor  # [n, n] bool
    rope: tuple[Tensor, Tensor]  # [n, rotary / 2]
    last: Tensor  # [B]


class HybridTarget:
    """Weights, states and KV memory for up to ``batch`` requests of ``context`` tokens.

    modules: generated any:N modules by N; a pass uses the smallest that holds a request's nodes.
    """

    def __init__(
        self,
        shape: TargetShape,
        modules: Mapping[int, ModuleType],
        *,
        batch: int,
        context: int,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape, self.modules = shape, dict(sorted(modules.items()))
        self.dtype, self.device = dtype, torch.device(device)
        self._gen = torch.Generator(self.device).manual_seed(0)
        s = shape
        self.embed = self._weight(s.vocabulary, s.hidden)
        self.head = self._weight(s.vocabulary, s.hidden)
        self.layers = [self._layer(i) for i in range(s.layers)]
        recurrent = sum(not s.is_attention(i) for i in range(s.layers))
        value_heads, (d_k, d_v) = s.heads[1], s.dims
        self.states = self._random(recurrent, batch, value_heads, d_v, d_k, dtype=torch.float32)
        self.windows = self._random(recurrent, batch, s.channels, s.conv - 1)
        # one pool for the keys and values of any batch and context that fit
        sizes = (s.layers - recurrent, batch * s.kv_heads * context * s.head_dim)
        self.keys, self.values = self._random(*sizes), self._random(*sizes)
        self.factors = {
            n: module.allocate(batch, recurrent, self.device) for n, module in self.modules.items()
        }

    def prepare(self, target_pass: Pass) -> Callable[[], Tensor]:
        """What runs a pass and returns its logits [B, n, vocabulary]; checked arguments, once."""
        place = self.place(target_pass)
        tokens = torch.randint(
            self.shape.vocabulary, place.parents.shape, generator=self._gen, device=self.device
        )
        if place.module is not None:
            factors = self.factors[place.module]
            factors.check = True
            self.run(tokens, place)
            factors.check = False
        return lambda: self.run(tokens, place)

    def place(self, target_pass: Pass) -> Place:
        """Everything of a pass but its tokens. Raises ValueError for more nodes than modules."""
        rows, nodes = target_pass.batch, target_pass.nodes // target_pass.batch
        tree, module = heap_tree(nodes), None
        if target_pass.template is not None:
            module = next((n for n in self.modules if n >= nodes), None)
            if module is None:
                raise ValueError(f"nodes: expected at most {max(self.modules)}, got {nodes}")
        sees = _ancestors(tree).to(self.device)
        half = self.shape.rotary // 2
        rates = 1e7 ** -(torch.arange(half, device=self.device) / half)
        angles = (target_pass.context + sees.sum(1) - 1)[:, None] * rates
        return Place(
            context=target_pass.context,
            module=module,
            slots=torch.arange(rows, device=self.device),
            parents=torch.tensor([tree] * rows, dtype=torch.int32, device=self.device),
            sees=sees,
            rope=(angles.cos().to(self.dtype), angles.sin().to(self.dtype)),
            last=torch.full((rows,), nodes - 1, device=self.device),
        )

    @torch.no_grad()
    def run(self, tokens: Tensor, at: Place) -> Tensor:
        """Logits of a pass."""
        x = self.embed[tokens]
        recurrent = attention = 0
        for layer, w in enumerate(self.layers):
            h = functional.rms_norm(x, x.shape[-1:], w["norm1"])
            if self.shape.is_attention(layer):
                x = x + self._attention(w, h, attention, at)
                attention += 1
            else:
                x = x + self._delta(w, h, recurrent, at)
                recurrent += 1
            h = functional.rms_norm(x, x.shape[-1:], w["norm2"])
            gate, up = functional.linear(h, w["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w["down"])
        if at.module is not None:
            module, factors = self.modules[at.module], self.factors[at.module]
            module.commit(
                factors, self.states, self.windows, at.slots, at.last,
                parents=at.parents,
            )  # fmt: skip
        return functional.linear(functional.rms_norm(x, x.shape[-1:], w["norm1"]), self.head)

    def _delta(self, w: Any, h: Tensor, layer: int, at: Place) -> Tensor:
        s = self.shape
        value_heads, d_v = s.heads[1], s.dims[1]
        sizes = [s.channels, value_heads * d_v, value_heads, value_heads]
        x, z, a, b = functional.linear(h, w["in"]).split(sizes, -1)
        arguments = (x, a, b, w["conv"], w["A_log"], w["dt_bias"])
        pools = (self.states[layer], self.windows[layer], at.slots)
        if at.module is None:
            out = decode_step(*arguments, *pools, heads=s.heads)
        else:
            out = self.modules[at.module].verify(
                *arguments, *pools, self.factors[at.module],
                layer=layer, parents=at.parents,
            )  # fmt: skip
        out = functional.rms_norm(out, (d_v,), w["out_norm"]).flatten(2) * functional.silu(z)
        return functional.linear(out, w["out"])

    def _attention(self, w: Any, h: Tensor, layer: int, at: Place) -> Tensor:
        s, (rows, nodes) = self.shape, h.shape[:2]
        q_size, kv_size = s.query_heads * s.head_dim, s.kv_heads * s.head_dim
        split = functional.linear(h, w["in"]).split([q_size, q_size, kv_size, kv_size], -1)
        q, k, v = (
            split[i].reshape(rows, nodes, -1, s.head_dim).transpose(1, 2) for i in (0, 2, 3)
        )
        q = _rotate(functional.rms_norm(q, (s.head_dim,), w["q_norm"]), at.rope)
        k = _rotate(functional.rms_norm(k, (s.head_dim,), w["k_norm"]), at.rope)
        shape = (rows, s.kv_heads, at.context, s.head_dim)
        size = rows * s.kv_heads * at.context * s.head_dim
        keys, values = (pool[layer, :size].view(shape) for pool in (self.keys, self.values))
        out = attend(q, k, v, keys, values, at.sees)
        out = out.transpose(1, 2).flatten(2) * torch.sigmoid(split[1])
        return functional.linear(out, w["out"])

    def _layer(self, layer: int) -> dict[str, Tensor]:
        s = self.shape
        ones = torch.ones(s.hidden, dtype=self.dtype, device=self.device)
        w = {"norm1": ones, "norm2": ones}
        w["gate_up"] = self._weight(2 * s.inner, s.hidden)
        w["down"] = self._weight(s.hidden, s.inner)
        if s.is_attention(layer):
            q_size, kv_size = s.query_heads * s.head_dim, s.kv_heads * s.head_dim
            norm = torch.ones(s.head_dim, dtype=self.dtype, device=self.device)
            w |= {"q_norm": norm, "k_norm": norm, "out": self._weight(s.hidden, q_size)}
            return w | {"in": self._weight(2 * (q_size + kv_size), s.hidden)}
        value_heads, d_v = s.heads[1], s.dims[1]
        w["in"] = self._weight(s.channels + value_heads * (d_v + 2), s.hidden)
        w["out"] = self._weight(s.hidden, value_heads * d_v)
        w["conv"] = self._random(s.channels, s.conv)
        w["A_log"] = self._random(value_heads, dtype=torch.float32)
        w["dt_bias"] = self._random(value_heads, dtype=torch.float32)
        return w | {"out_norm": torch.ones(d_v, dtype=self.dtype, device=self.device)}

    def _weight(self, *shape: int) -> Tensor:
        return self._random(*shape).mul_(shape[-1] ** -0.5)

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        empty = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return empty.normal_(generator=self._gen)


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """Attention of tree nodes to the prefix and to their ancestors: [B, Hq, n, D].

    q [B, Hq, n, D]; k, v [B, Hkv, n, D] of the nodes; keys, values [B, Hkv, S, D] of the prefix;
    sees [n, n] bool. Query heads of one key head are rows of one product.
    """
    rows, kv_heads, length, d = keys.shape
    nodes = q.shape[2]
    group = q.shape[1] // kv_heads
    q = q.reshape(rows, kv_heads, group * nodes, d)
    splits = _count_splits(rows * kv_heads * -(-group * nodes // 64), length)
    wide = q[:, :, None].expand(-1, -1, splits, -1, -1).flatten(1, 2)
    out, lse = _flash(
        wide,
        keys.view(rows, kv_heads * splits, length // splits, d),
        values.view(rows, kv_heads * splits, length // splits, d),
    )
    out = out.unflatten(1, (kv_heads, splits)).float()
    lse = lse.unflatten(1, (kv_heads, splits))
    scores = (q @ k.mT).float() * d**-0.5
    scores = scores.masked_fill(~sees.repeat(group, 1), float("-inf"))
    own_lse = scores.logsumexp(-1)
    own = (scores - own_lse[..., None]).exp().to(v.dtype) @ v
    total = torch.logaddexp(lse.logsumexp(2), own_lse)
    out = (out * (lse - total[:, :, None]).exp()[..., None]).sum(2)
    out = out + own * (own_lse - total).exp()[..., None]
    merged: Tensor = out.to(q.dtype).view(rows, kv_heads * group, nodes, d)
    return merged


def _count_splits(programs: int, length: int) -> int:
    """Enough programs for two waves of 132 multiprocessors, chunks of at least 256 tokens."""
    splits = 1
    while programs * splits < 264 and length % (2 * splits) == 0 and length // splits >= 512:
        splits *= 2
    return splits


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp [B, H, n]."""
    if q.is_cuda:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        return out[0], out[1]
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _ancestors(tree: list[int]) -> Tensor:
    """[n, n] bool: j is i or above it."""
    sees = torch.eye(len(tree), dtype=torch.bool)
    for node in range(1, len(tree)):
        sees[node] |= sees[tree[node]]
    return sees

# mypy: allow-untyped-calls
"""Passes of a Qwen3.5 model of transformers: one-token decode, and whole draft trees.

The model's own modules and weights, with two things put in their place: a Gated DeltaNet layer's
convolution and recurrence are a generated module's verify (trees, commit included) or two small
kernels that update states in place, as engines decode; attention goes over a static KV memory.
It reads the prefix in splits by flash attention and merges the tree's own part, under an ancestor
mask, by log-sum-exp. Rows of the tree are not appended to the KV memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode_kernels import decode_step
from bolegen_runtime import Pass
from bolegen_runtime.adapters import adapt_model
from examples.tree_decoding import layers

__all__ = ["HybridTarget", "Place", "attend", "heap_tree"]

Mix = Callable[[Any, Tensor], Tensor]
"""A token mixer: transformers' module and its normalised rows, to rows [B, n, hidden]."""


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
    rope: layers.Rope  # [1, n, rotary] each
    last: Tensor  # [B]


class HybridTarget:
    """A model, with states and KV memory for up to ``batch`` requests of ``context`` tokens.

    model: transformers' Qwen3_5ForCausalLM, whose weights are used where they are. modules:
    generated any:N modules by N; a pass uses the smallest that holds a request's nodes. States,
    windows, keys and values start random.
    """

    def __init__(
        self, model: Any, modules: Mapping[int, ModuleType], *, batch: int, context: int
    ) -> None:
        self.model, self.modules = model, dict(sorted(modules.items()))
        self.dtype, self.device = model.lm_head.weight.dtype, model.lm_head.weight.device
        self._gen = torch.Generator(self.device).manual_seed(0)
        c = self.config = model.config
        self.adapters = adapt_model(model)
        recurrent, channels = len(self.adapters), self.adapters[0].token_mixer.conv_dim
        self.heads = (c.linear_num_key_heads, c.linear_num_value_heads)
        state = (self.heads[1], c.linear_value_head_dim, c.linear_key_head_dim)
        self.states = self._random(recurrent, batch, *state, dtype=torch.float32)
        self.windows = self._random(recurrent, batch, channels, c.linear_conv_kernel_dim - 1)
        # one pool for the keys and values of any batch and context that fit
        size = batch * c.num_key_value_heads * context * c.head_dim
        pool = (c.num_hidden_layers - recurrent, size)
        self._keys, self._values = self._random(*pool), self._random(*pool)
        self.factors = {
            n: module.allocate(batch, recurrent, self.device) for n, module in self.modules.items()
        }

    def memory(self, layer: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, Hkv, context, D] of the layer-th attention layer, as views."""
        shape = (rows, self.config.num_key_value_heads, context, self.config.head_dim)
        size = rows * shape[1] * context * shape[3]
        return self._keys[layer, :size].view(shape), self._values[layer, :size].view(shape)

    def prepare(self, target_pass: Pass) -> Callable[[], Tensor]:
        """What runs a pass and returns its logits [B, n, vocabulary]; checked arguments, once."""
        place = self.place(target_pass)
        tokens = torch.randint(
            self.config.vocab_size, place.parents.shape, generator=self._gen, device=self.device
        )
        if place.module is not None:
            factors = self.factors[place.module]
            factors.check = True
            self.run(tokens, place)
            factors.check = False
        return lambda: self.run(tokens, place)

    def place(self, target_pass: Pass, tree: Sequence[int] | None = None) -> Place:
        """Everything of a pass but its tokens; tree: the parents of each row, None for a heap's.

        Raises ValueError for more nodes than modules.
        """
        rows, nodes = target_pass.batch, target_pass.nodes // target_pass.batch
        tree, module = tree or heap_tree(nodes), None
        if target_pass.template is not None:
            module = next((n for n in self.modules if n >= nodes), None)
            if module is None:
                raise ValueError(f"nodes: expected at most {max(self.modules)}, got {nodes}")
        sees = _ancestors(tree).to(self.device)
        # text has the same position on all three axes of the rotary embedding
        positions = (target_pass.context + sees.sum(1) - 1).expand(3, 1, -1)
        return Place(
            context=target_pass.context,
            module=module,
            slots=torch.arange(rows, device=self.device),
            parents=torch.tensor([tree] * rows, dtype=torch.int32, device=self.device),
            sees=sees,
            rope=self.model.model.rotary_emb(self.model.lm_head.weight, positions),
            last=torch.full((rows,), nodes - 1, device=self.device),
        )

    @torch.no_grad()
    def run(self, tokens: Tensor, at: Place) -> Tensor:
        """Logits of a pass. Decode moves states on; a tree commits the path to its last node."""
        model = self.model.model
        x = model.embed_tokens(tokens)
        recurrent = attention = 0
        for layer in model.layers:
            if layers.is_recurrent(layer):
                x = layers.apply_layer(layer, x, self._delta(recurrent, at))
                recurrent += 1
            else:
                x = layers.apply_layer(layer, x, self._attention(attention, at))
                attention += 1
        if at.module is not None:
            self.modules[at.module].commit(
                self.factors[at.module], self.states, self.windows, at.slots, at.last,
                parents=at.parents,
            )  # fmt: skip
        logits: Tensor = self.model.lm_head(model.norm(x))
        return logits

    def _delta(self, layer: int, at: Place) -> Mix:
        def mix(mixer: Any, x: Tensor) -> Tensor:
            adapter = self.adapters[layer]
            rows, own = adapter.project(x), adapter.constants
            weights = (own.conv_weight, own.A_log, own.dt_bias)
            pools = (self.states[layer], self.windows[layer], at.slots)
            arguments: tuple[Any, ...] = (rows.x, rows.a, rows.b, *weights, *pools)
            if at.module is None:
                out = decode_step(*arguments, heads=self.heads)
            else:
                factors = self.factors[at.module]
                factors.traced = layer > 0  # the first layer traces the tree for all
                out = self.modules[at.module].verify(
                    *arguments, factors, layer=layer, parents=at.parents
                )
                factors.traced = False
            return adapter.finish(out, rows.gate)

        return mix

    def _attention(self, layer: int, at: Place) -> Mix:
        def mix(mixer: Any, x: Tensor) -> Tensor:
            rows = layers.attention_rows(mixer, x, at.rope)
            memory = self.memory(layer, len(x), at.context)
            out = attend(rows.q, rows.k, rows.v, *memory, at.sees)
            projected: Tensor = mixer.o_proj(
                out.transpose(1, 2).flatten(2) * torch.sigmoid(rows.gate)
            )
            return projected

        return mix

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


def _ancestors(tree: Sequence[int]) -> Tensor:
    """[n, n] bool: j is i or above it."""
    sees = torch.eye(len(tree), dtype=torch.bool)
    for node in range(1, len(tree)):
        sees[node] |= sees[tree[node]]
    return sees

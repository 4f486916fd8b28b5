"""The target's pass over a draft tree, and the commit of the accepted path.

Gated DeltaNet layers call a generated bolegen module: every node is verified in parallel
from one state, which stays untouched until the accepted path is committed, in one launch
for all layers. Attention layers use an ancestor mask and keep the path's keys and values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from bolegen.ir import TreeTemplate
from bolegen_runtime.adapters import adapt_model

from . import layers
from .model import Model

__all__ = ["TreeTarget", "ancestor_mask"]


def ancestor_mask(tree: TreeTemplate) -> Tensor:
    """[T, T] bool: entry (i, j) says that j is i or one of its ancestors."""
    mask = torch.zeros(tree.nodes, tree.nodes, dtype=torch.bool)
    for node in range(tree.nodes):
        mask[node, list(tree.path(node))] = True
    return mask


class TreeTarget:
    """One request of a target model, decoded tree by tree.

    ``module`` is a generated module with a static template, compiled for the model's heads,
    dimensions and dtype. ``capacity`` is the most tokens that the request may have, the
    nodes of its last tree included.
    """

    def __init__(self, model: Model, module: Any, *, capacity: int) -> None:
        self.model, self.module = model, module
        self.tree = TreeTemplate.from_parents(module.MODULE.parents)
        self.length = 0  # committed tokens
        config, like = model.config, model.target.lm_head.weight
        self._levels = torch.tensor(self.tree.levels, device=model.device)
        self._ancestors = ancestor_mask(self.tree).to(model.device)
        self._recurrent = [
            i for i, layer in enumerate(model.target.model.layers) if layers.is_recurrent(layer)
        ]
        self._memories = {
            i: layers.KeyValues(config.num_key_value_heads, config.head_dim, capacity, like)
            for i in range(config.num_hidden_layers)
            if i not in self._recurrent
        }
        self._adapters = adapt_model(model.target)
        shapes = self._adapters[0].shapes
        (hk, hv), (dk, dv) = shapes["heads"], shapes["dims"]
        # pools of one slot: [L, slots, Hv, dv, dk] and [L, slots, C, W-1]
        pools, channels = (len(self._recurrent), 1), 2 * hk * dk + hv * dv
        self._states = like.new_zeros(*pools, hv, dv, dk, dtype=torch.float32)
        self._windows = like.new_zeros(*pools, channels, shapes["conv"] - 1)
        self._slots = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._factors = module.allocate(1, len(self._recurrent), model.device)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Run the prompt through transformers and take its states over.

        Returns the final hidden rows [T, hidden].
        """
        cache = DynamicCache(config=self.model.config)
        hidden = self.model.forward(torch.tensor([prompt], device=self.model.device), cache)
        entries: list[Any] = cache.layers
        for row, adapter in enumerate(self._adapters):
            adapter.import_cache(cache, self._states[row], self._windows[row], self._slots)
        for i, memory in self._memories.items():
            memory.append(0, entries[i].keys, entries[i].values)
        self.length = len(prompt)
        return hidden[0]

    @torch.no_grad()
    def verify(self, tokens: Tensor, live: Tensor) -> Tensor:
        """Final hidden rows [T, hidden] of the tree's nodes; nothing is committed.

        tokens: [T] ids, node 0 the last decided token; live: [T] bool, prefix-closed.
        Rows of dead nodes mean nothing.
        """
        x = self.model.embed(tokens[None])
        rope = self.model.rope(x, (self.length + self._levels)[None])
        prefix = self._ancestors.new_ones(self.tree.nodes, self.length)
        mask = torch.cat([prefix, self._ancestors], 1)
        for i, layer in enumerate(self.model.target.model.layers):
            mix = (
                self._delta_mixer(self._recurrent.index(i), live)
                if i in self._recurrent
                else self._attention_mixer(self._memories[i], rope, mask)
            )
            x = layers.apply_layer(layer, x, mix)
        hidden: Tensor = self.model.target.model.norm(x)
        return hidden[0]

    def commit(self, path: Sequence[int]) -> None:
        """Make the nodes of ``path``, from the root down, part of the request."""
        last = torch.tensor([path[-1]], dtype=torch.int32, device=self.model.device)
        self.module.commit(self._factors, self._states, self._windows, self._slots, last)
        rows = torch.tensor(path, device=self.model.device)
        for memory in self._memories.values():
            memory.keep(self.length, rows)
        self.length += len(path)

    def _delta_mixer(self, row: int, live: Tensor) -> Callable[[Any, Tensor], Tensor]:
        def mix(mixer: Any, x: Tensor) -> Tensor:
            return self._adapters[row].verify(
                self.module,
                x,
                self._states[row],
                self._windows[row],
                self._slots,
                self._factors,
                layer=row,
                live=live[None],
            )

        return mix

    def _attention_mixer(
        self, memory: layers.KeyValues, rope: layers.Rope, mask: Tensor
    ) -> Callable[[Any, Tensor], Tensor]:
        def mix(mixer: Any, x: Tensor) -> Tensor:
            rows = layers.attention_rows(mixer, x, rope)
            keys, values = memory.append(self.length, rows.k, rows.v)
            return layers.attention_output(mixer, rows, keys, values, mask)

        return mix

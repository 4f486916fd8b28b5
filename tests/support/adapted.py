"""Tree verification in a model of transformers: its token mixers are adapters for one pass."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bolegen.ir import DType, TreeTemplate
from bolegen_runtime import adapters
from support.rounds import build

__all__ = ["AdaptedModel", "check_tree"]

SLOTS = 3
LENGTH = 9
TEMPLATE = "parents:[-1,0,0,1,1,2,3]"
# last nodes of two requests, equally deep so that their caches keep one length
LAST = (4, 5)


class AdaptedModel:
    """A model with adapters for its recurrent layers, and a cache and pools for two requests."""

    def __init__(self, model: Any, template: str) -> None:
        self.model, self.layers = model, adapters.adapt_model(model)
        shapes = self.layers[0].shapes
        (hk, hv), (dk, dv) = shapes["heads"], shapes["dims"]
        self.module: Any = build(
            template, mixer=shapes["mixer"], key_heads=hk, value_heads=hv, d_k=dk, d_v=dv,
            conv=shapes["conv"], dtype=DType.FP32,
        )  # fmt: skip
        self.tree = TreeTemplate.from_parents(self.module.MODULE.parents)
        self.device = next(model.parameters()).device
        self.slots = torch.tensor([2, 0], device=self.device)
        self.factors = self.module.allocate(2, len(self.layers), self.device)
        pools, channels = (len(self.layers), SLOTS), 2 * hk * dk + hv * dv
        self.states = torch.randn(*pools, hv, dv, dk, device=self.device)
        self.windows = torch.randn(*pools, channels, shapes["conv"] - 1, device=self.device)

    def run(
        self, tokens: Tensor, cache: Any, positions: Sequence[int], **options: Any
    ) -> tuple[Tensor, Any]:
        """Logits [B, T, vocabulary] of transformers' own forward; the cache moves on.

        positions: [T], said where the model has them: Bamba and MiniMax count a step's from 0.
        """
        known = inspect.signature(self.model.forward).parameters
        if "position_ids" in known:
            at = torch.tensor(list(positions), device=self.device)
            options["position_ids"] = at.expand(len(tokens), -1)
        # before 5.2x each family had a name of its own for it
        name = next(n for n in ("cache", "past_key_values", "cache_params") if n in known)
        if "logits_to_keep" in known:
            options["logits_to_keep"] = 0
        out = self.model(tokens, use_cache=True, **{name: cache}, **options)
        return out.logits, out[name]

    def take(self, cache: Any) -> None:
        """States and windows of the cache into the pools."""
        for at, layer in enumerate(self.layers):
            layer.import_cache(cache, *self._pools(at), self.slots)

    def verify(self, tokens: Tensor, cache: Any, length: int) -> Tensor:
        """Logits [B, T, vocabulary] of a tree's nodes after ``length`` tokens.

        Keys and values of all nodes are appended to the cache; recurrent layers leave theirs.
        """
        nodes = self.tree.nodes
        sees = torch.zeros(nodes, length + nodes, dtype=torch.bool)
        sees[:, :length] = True
        for node in range(nodes):
            sees[node, [length + at for at in self.tree.path(node)]] = True
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        mask = mask.expand(len(tokens), 1, -1, -1).to(self.device)
        positions = [length + level for level in self.tree.levels]
        with self._adapted():
            return self.run(tokens, cache, positions, attention_mask=mask)[0]

    def commit(self, cache: Any, last: Sequence[int], length: int) -> None:
        """Make each request's path to its last node part of the cache; paths of one length."""
        windows = self.windows if self.windows.shape[-1] else None
        nodes = torch.tensor(last, device=self.device)
        self.module.commit(self.factors, self.states, windows, self.slots, nodes)
        paths = [[length + at for at in self.tree.path(node)] for node in last]
        kept = torch.tensor([[*range(length), *path] for path in paths], device=self.device)
        for entry in cache.layers:
            for name in ("keys", "values"):
                rows = getattr(entry, name, None)
                if rows is not None and rows.dim() == 4:
                    index = kept[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
                    setattr(entry, name, rows.gather(2, index))
        for at, layer in enumerate(self.layers):
            layer.export_cache(cache, *self._pools(at), self.slots)

    def walk(self, tokens: Tensor, cache: Any, length: int) -> tuple[list[Tensor], list[Any]]:
        """Of every node: logits [B, vocabulary], and the cache after its path, step by step."""
        logits, caches = list[Tensor](), list[Any]()
        for node, parent in enumerate(self.tree.parents or ()):
            own = deepcopy(cache if parent < 0 else caches[parent])
            at = length + self.tree.levels[node]
            step, own = self.run(tokens[:, node : node + 1], own, [at])
            logits.append(step[:, -1])
            caches.append(own)
        return logits, caches

    def _pools(self, at: int) -> tuple[Tensor, Tensor | None]:
        return self.states[at], self.windows[at] if self.windows.shape[-1] else None

    @contextmanager
    def _adapted(self) -> Iterator[None]:
        for at, layer in enumerate(self.layers):
            layer.token_mixer.forward = self._mixer(at)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.token_mixer.forward

    def _mixer(self, at: int) -> Any:
        layer = self.layers[at]

        def forward(hidden_states: Tensor, **_: Any) -> Any:
            out = layer.verify(
                self.module, hidden_states, *self._pools(at), self.slots, self.factors, layer=at
            )
            return (out, None) if layer.shapes["mixer"] == "lightning" else out

        return forward


def check_tree(model: Any, *, rtol: float, atol: float) -> None:
    """Prompt, tree, commit and five more tokens of two requests, each beside plain steps."""
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    torch.manual_seed(1)
    target = AdaptedModel(model, TEMPLATE)

    def draw(count: int) -> Tensor:
        return torch.randint(model.config.vocab_size, (2, count)).to(target.device)

    tokens = draw(target.tree.nodes)
    _, cache = target.run(draw(LENGTH), None, range(LENGTH))
    alone, caches = target.walk(tokens, cache, LENGTH)
    target.take(cache)
    close(target.verify(tokens, cache, LENGTH), torch.stack(alone, 1))
    target.commit(cache, LAST, LENGTH)
    start = LENGTH + target.tree.levels[LAST[0]] + 1
    for row, last in enumerate(LAST):
        own, reference = deepcopy(cache), caches[last]
        for at in range(start, start + 5):
            step = draw(1)
            expected, reference = target.run(step, reference, [at])
            found, own = target.run(step, own, [at])
            close(found[row], expected[row])

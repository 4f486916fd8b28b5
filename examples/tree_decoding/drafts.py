"""Draft trees: from the model's own MTP head, or from n-grams of the text so far.

Both fill a fixed template, each node with a token and the probability that the drafter
gives it after its parent. A node that stays empty has probability 0 and is dead.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bolegen.ir import TreeTemplate

from . import layers
from .model import Model
from .target import ancestor_mask

__all__ = ["Draft", "Drafter", "MtpDrafter", "NgramDrafter"]

UNLIKELY = 1e-30  # a probability that is 0 in float32, told from "no draft"


@dataclass(frozen=True)
class Draft:
    """A token and a conditional probability for every node of the template, root included."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    @property
    def live(self) -> tuple[bool, ...]:
        """Nodes that hold a draft; prefix-closed."""
        return tuple(p > 0 for p in self.probabilities)


class Drafter(Protocol):
    """What the decoding loop asks of a drafter of one request."""

    def observe(self, tokens: Sequence[int], hidden: Tensor) -> None:
        """Tokens were committed; hidden: [len(tokens), hidden], the target's final rows."""

    def draft(self, root: int) -> Draft:
        """A tree below the decided token ``root``, which is not committed yet."""


class NgramDrafter:
    """Drafts what followed the last tokens earlier in the same request.

    Counts of all orders are blended as Witten and Bell do (1991): an order with c
    observations of k kinds weighs c / (c + k) against the orders below it.
    """

    def __init__(self, tree: TreeTemplate, *, order: int = 3) -> None:
        self._tree, self._order = tree, order
        self._text: list[int] = []
        self._counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def observe(self, tokens: Sequence[int], hidden: Tensor | None = None) -> None:
        """Count the n-grams that end at these tokens."""
        for token in tokens:
            for n in range(1, min(self._order, len(self._text)) + 1):
                self._counts[tuple(self._text[-n:])][token] += 1
            self._text.append(token)

    def predict(self, context: Sequence[int]) -> dict[int, float]:
        """Probabilities of the tokens seen after the end of ``context``; they sum below 1."""
        blended: dict[int, float] = {}
        for n in range(1, self._order + 1):
            counts = self._counts.get(tuple(context[-n:]), Counter())
            weight = 1 / (counts.total() + len(counts)) if counts else 0.0
            share = len(counts) * weight if counts else 1.0
            blended = {
                token: counts[token] * weight + blended.get(token, 0.0) * share
                for token in counts.keys() | blended.keys()
            }
        return blended

    def draft(self, root: int) -> Draft:
        """The likeliest continuations; where there are fewer than children, nodes stay dead."""
        tokens, probabilities = [0] * self._tree.nodes, [0.0] * self._tree.nodes
        tokens[0], probabilities[0] = root, 1.0
        for node, children in enumerate(self._tree.children):
            if not probabilities[node] or not children:
                continue
            path = [tokens[i] for i in self._tree.path(node)]
            found = self.predict([*self._text[-self._order :], *path])
            best = sorted(found.items(), key=lambda item: (-item[1], item[0]))
            for child, (token, probability) in zip(children, best, strict=False):
                tokens[child], probabilities[child] = token, probability
        return Draft(tuple(tokens), tuple(probabilities))


class MtpDrafter:
    """Drafts with the model's MTP head, level by level, from its own output at the parent.

    The head sees the committed entries and a node's ancestors. Committed entries hold the
    target's hidden rows; they are written when the token after them is known.
    """

    def __init__(self, model: Model, tree: TreeTemplate, *, capacity: int) -> None:
        self._model, self._tree = model, tree
        config, like = model.config, model.target.lm_head.weight
        self._memory = layers.KeyValues(
            config.num_key_value_heads, config.head_dim, capacity, like
        )
        self._ancestors = ancestor_mask(tree).to(model.device)
        self._length = 0  # committed entries
        self._tokens: list[int] = []
        self._hidden: list[Tensor] = []

    def observe(self, tokens: Sequence[int], hidden: Tensor) -> None:
        """Keep the tokens and the target's rows until the next token is known."""
        self._tokens += tokens
        self._hidden.append(hidden)

    @torch.no_grad()
    def draft(self, root: int) -> Draft:
        """The top tokens of the head below every node, as many as the node has children."""
        kids = self._tree.children
        tokens, probabilities = [root] * self._tree.nodes, [1.0] * self._tree.nodes
        level, placed, hidden = [0], list[int](), self._extend(root)
        while True:
            chances = self._model.logits(hidden).float().softmax(-1)
            top = chances.topk(max(len(kids[node]) for node in level))
            for node, values, ids in zip(
                level, top.values.tolist(), top.indices.tolist(), strict=True
            ):
                for child, value, token in zip(kids[node], values, ids, strict=False):
                    tokens[child], probabilities[child] = token, max(value, UNLIKELY)
            # a parent's row serves each child that drafts on
            rows = [r for r, node in enumerate(level) for child in kids[node] if kids[child]]
            level = [child for node in level for child in kids[node] if kids[child]]
            if not level:
                return Draft(tuple(tokens), tuple(probabilities))
            hidden = self._descend(level, placed, hidden[rows], tokens)
            placed += level

    def _extend(self, root: int) -> Tensor:
        """Write the entries that ``root`` completes; returns the last one's row [1, hidden]."""
        hidden = torch.cat(self._hidden)
        tokens = [*self._tokens[1:], root]
        start, end = self._length, self._length + len(tokens)
        seen = torch.ones(len(tokens), end, dtype=torch.bool, device=hidden.device).tril(start)
        positions = torch.arange(start, end, device=hidden.device)
        rows = self._run(tokens, hidden, positions, start, seen)
        self._length, self._tokens, self._hidden = end, [], []
        return rows[-1:]

    def _descend(
        self, level: list[int], placed: list[int], hidden: Tensor, tokens: list[int]
    ) -> Tensor:
        """Entries of one level's nodes behind those of ``placed``; returns rows [n, hidden]."""
        prefix = self._ancestors.new_ones(len(level), self._length)
        seen = torch.cat([prefix, self._ancestors[level][:, placed + level]], 1)
        # the root's entry, the last of the prefix, stands at position length - 1
        depth = self._tree.levels[level[0]]
        positions = torch.full((len(level),), self._length - 1 + depth, device=hidden.device)
        chosen = [tokens[node] for node in level]
        return self._run(chosen, hidden, positions, self._length + len(placed), seen)

    def _run(
        self, tokens: list[int], hidden: Tensor, positions: Tensor, at: int, seen: Tensor
    ) -> Tensor:
        """The head on entries (token, hidden row), written from row ``at`` on."""
        embeddings = self._model.embed(torch.tensor([tokens], device=hidden.device))
        rope = self._model.rope(embeddings, positions[None])

        def mix(mixer: Any, x: Tensor) -> Tensor:
            rows = layers.attention_rows(mixer, x, rope)
            keys, values = self._memory.append(at, rows.k, rows.v)
            return layers.attention_output(mixer, rows, keys, values, seen)

        drafted: Tensor = self._model.head(embeddings, hidden[None], mix)
        return drafted[0]

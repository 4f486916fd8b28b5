"""Greedy decoding by trees, and plainly token by token to compare with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from bolegen.ir import TreeTemplate

from .drafts import Draft, Drafter
from .model import Model
from .record import Round
from .target import TreeTarget

__all__ = ["Difference", "accept", "decode_plainly", "decode_trees", "find_differences"]


def accept(tree: TreeTemplate, draft: Draft, choices: Sequence[int]) -> tuple[int, ...]:
    """Nodes from the root down along which every draft is the target's choice at its parent.

    choices: the target's greedy token after each node.
    """
    path = [0]
    while True:
        wanted = choices[path[-1]]
        for child in tree.children[path[-1]]:
            if draft.live[child] and draft.tokens[child] == wanted:
                path.append(child)
                break
        else:
            return tuple(path)


def decode_trees(
    target: TreeTarget, drafter: Drafter, prompt: Sequence[int], count: int, *, index: int = 0
) -> tuple[list[int], list[Round]]:
    """At least ``count`` tokens after the prompt, cut to ``count``, and the rounds they took.

    Node 0 of a round's tree is the token that the target chose last: decided, not committed.
    """
    model, device = target.model, target.model.device
    hidden = target.prefill(prompt)
    drafter.observe(prompt, hidden)
    decided = int(model.logits(hidden[-1]).argmax())
    text, rounds = [decided], list[Round]()
    while len(text) < count:
        draft = drafter.draft(decided)
        tokens = torch.tensor(draft.tokens, device=device)
        hidden = target.verify(tokens, torch.tensor(draft.live, device=device))
        choices = model.logits(hidden).argmax(-1).tolist()
        path = accept(target.tree, draft, choices)
        target.commit(path)
        drafter.observe([draft.tokens[node] for node in path], hidden[list(path)])
        decided = choices[path[-1]]
        text += [*(draft.tokens[node] for node in path[1:]), decided]
        rounds.append(Round(index, draft.tokens, draft.probabilities, path, decided))
    return text[:count], rounds


@torch.no_grad()
def decode_plainly(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation by transformers' own forward, one token at a time."""
    cache = DynamicCache(config=model.config)
    rows = model.forward(torch.tensor([prompt], device=model.device), cache)
    text = [int(model.logits(rows[0, -1]).argmax())]
    while len(text) < count:
        rows = model.forward(torch.tensor([text[-1:]], device=model.device), cache)
        text.append(int(model.logits(rows[0, -1]).argmax()))
    return text


@dataclass(frozen=True)
class Difference:
    """A token that plain decoding would not have chosen after the same text."""

    prompt: int
    at: int  # tokens after the prompt
    chosen: int
    plain: int
    lead: float  # of the plain choice's logit, in ulp of the logits' dtype at that logit


@torch.no_grad()
def find_differences(
    model: Model, prompt: Sequence[int], tokens: Sequence[int], *, index: int = 0
) -> list[Difference]:
    """Feed ``tokens`` to plain decoding, whatever it would choose, and list where it differs."""
    cache = DynamicCache(config=model.config)
    found = list[Difference]()
    for at, token in enumerate(tokens):
        fed = prompt if at == 0 else [tokens[at - 1]]
        rows = model.forward(torch.tensor([fed], device=model.device), cache)
        logits = model.logits(rows[0, -1])
        plain = int(logits.argmax())
        if plain != token:
            found.append(Difference(index, at, token, plain, _lead(logits, plain, token)))
    return found


def _lead(logits: Tensor, plain: int, token: int) -> float:
    best = float(logits[plain])
    exponent = math.floor(math.log2(abs(best))) if best else -126
    return (best - float(logits[token])) / (torch.finfo(logits.dtype).eps * 2.0**exponent)

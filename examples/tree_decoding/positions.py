"""``python -m examples.tree_decoding.positions FILE``: a draft tree at every place of the text.

The rounds that `--record` writes stand where accepted paths happened to end. To replay another
choice of nodes, which accepts less, one needs the trees in between: this records the tree that
the MTP head drafts after each token of the greedy text, and the path that verifying all of it
would accept. Trees decode what plain decoding gives, so no tree has to be verified for it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache

from bolegen.ir import TreeTemplate, parse_template

from .__main__ import SHIPPED
from .decode import accept, decode_plainly
from .drafts import MtpDrafter
from .model import Model, load
from .record import Round, write_rounds

__all__ = ["main", "record_positions"]


@torch.no_grad()
def record_positions(
    model: Model, tree: TreeTemplate, prompt: Sequence[int], count: int, *, index: int = 0
) -> list[Round]:
    """``count`` rounds: round i has the i-th token after the prompt at its root."""
    depth = max(tree.levels)
    text = decode_plainly(model, prompt, count + depth + 1)
    fed = [*prompt, *text[:count]]
    cache = DynamicCache(config=model.config)
    hidden = model.forward(torch.tensor([fed], device=model.device), cache)[0]
    drafter = MtpDrafter(model, tree, capacity=len(fed) + tree.nodes)
    drafter.observe(prompt, hidden[: len(prompt)])
    rounds = []
    for i in range(count):
        draft = drafter.draft(text[i])
        # along the text the target's choice after a node of level l is token i + l + 1
        path = accept(tree, draft, [text[i + level + 1] for level in tree.levels])
        rounds.append(Round(index, draft.tokens, draft.probabilities, path, text[i + len(path)]))
        at = len(prompt) + i
        drafter.observe([text[i]], hidden[at : at + 1])
    return rounds


def main() -> int:
    """Record the prompts of a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m examples.tree_decoding.positions")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, default=SHIPPED, metavar="DIR")
    parser.add_argument("--template", default="(3,3,3)", help="a static one")
    parser.add_argument("--prompts", type=int, default=32, metavar="K")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="rounds a prompt")
    options = parser.parse_args()
    model = load(options.model, dtype=torch.float32, device="cpu")
    tree = parse_template(options.template)
    rounds = [
        item
        for index, prompt in enumerate(model.prompts[: options.prompts])
        for item in record_positions(model, tree, prompt, options.tokens, index=index)
    ]
    header = {
        "model": options.model.name,
        "drafter": "mtp",
        "dtype": "fp32",
        "template": options.template,
        "parents": tree.parents,
        "positions": "every",
    }
    write_rounds(options.file, header, rounds)
    accepted = sum(item.accepted for item in rounds) / len(rounds)
    print(f"{len(rounds)} rounds, mean accepted length {accepted:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

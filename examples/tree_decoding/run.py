"""The command's work: load, compile, decode, compare, print."""
# mypy: allow-untyped-calls

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import bolegen_runtime
from bolegen.errors import TreeError
from bolegen.ir import parse_template

from .decode import Difference, decode_plainly, decode_trees, find_differences
from .drafts import Drafter, MtpDrafter, NgramDrafter
from .model import Model, load
from .record import Round, write_rounds
from .target import TreeTarget

__all__ = ["Totals", "compile_tree", "decode_prompt", "run"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# fp32 must agree in every token; bf16 may differ where rounding alone decides
MAX_LEAD_ULP = {"fp32": 0.0, "bf16": 2.0}


@dataclass
class Totals:
    """What a run adds up over its prompts."""

    rounds: list[Round] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    tokens: int = 0
    tree_seconds: float = 0.0
    plain_seconds: float = 0.0


def compile_tree(model: Model, template: str, dtype: str) -> Any:
    """The bolegen module that verifies ``template`` in this model's Gated DeltaNet layers.

    Raises TreeError for a template whose topology is not known beforehand.
    """
    tree = parse_template(template)
    if not tree.is_static:
        raise TreeError(
            f"{template} has no topology to fill with drafts; this example decodes with a "
            'static template such as "(2,2,1)"'
        )
    config = model.config
    return bolegen_runtime.load(
        template,
        heads=(config.linear_num_key_heads, config.linear_num_value_heads),
        dims=(config.linear_key_head_dim, config.linear_value_head_dim),
        conv=config.linear_conv_kernel_dim,
        dtype=dtype,
        state_dtype="fp32",
    )


def decode_prompt(
    model: Model, module: Any, drafter: str, index: int, count: int, totals: Totals
) -> list[int]:
    """Decode one prompt both ways and add up; returns the tokens that the trees gave."""
    prompt = model.prompts[index]
    # the last round writes a whole tree behind the tokens asked for
    capacity = len(prompt) + count + module.MODULE.nodes
    target = TreeTarget(model, module, capacity=capacity)
    drafts: Drafter = (
        MtpDrafter(model, target.tree, capacity=capacity)
        if drafter == "mtp"
        else NgramDrafter(target.tree)
    )
    start = time.monotonic()
    tokens, rounds = decode_trees(target, drafts, prompt, count, index=index)
    middle = time.monotonic()
    plain = decode_plainly(model, prompt, count)
    totals.tree_seconds += middle - start
    totals.plain_seconds += time.monotonic() - middle
    totals.tokens += len(tokens)
    totals.rounds += rounds
    if tokens != plain:
        totals.differences += find_differences(model, prompt, tokens, index=index)
    return tokens


def show_text(model: Model, tokens: Sequence[int], rounds: Sequence[Round]) -> str:
    """The text with a bar before what each round added."""
    if model.tokenizer is None:
        return " ".join(map(str, tokens))
    at, pieces = 1, [tokens[:1]]
    for item in rounds:
        pieces.append(tokens[at : at + item.accepted])
        at += item.accepted
    return "|".join(model.tokenizer.decode(list(piece)) for piece in pieces)


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks; returns the exit status."""
    transformers.logging.set_verbosity_error()
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32, convolutions too
    model = load(options.model, dtype=DTYPES[options.dtype], device=options.device)
    start = time.monotonic()
    module = compile_tree(model, options.template, options.dtype)
    print(
        f"{options.model.name}: template {options.template}, {module.MODULE.nodes} nodes, "
        f"compiled in {time.monotonic() - start:.2f} s; drafts from {options.drafter}; "
        f"{options.dtype} on {options.device}"
    )
    totals = Totals()
    for index in range(min(options.prompts, len(model.prompts))):
        before = len(totals.rounds)
        tokens = decode_prompt(model, module, options.drafter, index, options.tokens, totals)
        rounds = totals.rounds[before:]
        print(
            f"\nprompt {index}: {len(tokens)} tokens in {len(rounds)} rounds; accepted length "
            + " ".join(str(item.accepted) for item in rounds)
        )
        if index == 0:
            print(show_text(model, tokens, rounds))
    if options.record:
        header = {
            "model": options.model.name,
            "drafter": options.drafter,
            "dtype": options.dtype,
            "template": options.template,
            "parents": module.MODULE.parents,
        }
        write_rounds(options.record, header, totals.rounds)
    return report(totals, options.dtype)


def report(totals: Totals, dtype: str) -> int:
    """Print the totals; 0 if every token is plain decoding's, rounding ties in bf16 apart."""
    accepted = sum(item.accepted for item in totals.rounds) / max(1, len(totals.rounds))
    print(
        f"\n{len(totals.rounds)} rounds, mean accepted length {accepted:.2f}; "
        f"by trees {totals.tree_seconds:.1f} s, plainly {totals.plain_seconds:.1f} s"
    )
    worst = 0.0
    for item in totals.differences:
        worst = max(worst, item.lead)
        print(
            f"prompt {item.prompt}, token {item.at}: trees chose {item.chosen} and plain decoding "
            f"{item.plain}, which leads by {item.lead:.2f} ulp of {dtype}"
        )
    if not totals.differences:
        print(f"all {totals.tokens} tokens equal plain decoding's")
        return 0
    print(
        f"{len(totals.differences)} of {totals.tokens} tokens differ from plain decoding after "
        f"the same text; the largest lead is {worst:.2f} ulp, allowed {MAX_LEAD_ULP[dtype]:.0f}"
    )
    return int(dtype == "fp32" or worst > MAX_LEAD_ULP[dtype])

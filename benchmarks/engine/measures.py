"""What one engine is asked to do: greedy batches, sampling, conversations."""

import random
import statistics
import time
from collections import Counter
from typing import Any

__all__ = ["converse", "measure_batch", "sample"]

GREEDY = {"temperature": 0.0, "ignore_eos": True}
POSITIONS = range(1, 5)  # the first token is prefill's, whatever verifies the others


def measure_batch(
    engine: Any, prompts: list[list[int]], new_tokens: int, repeats: int
) -> dict[str, Any]:
    """One batch size: the first run warms up, and its tokens must be those of the others."""
    asked = {**GREEDY, "max_new_tokens": new_tokens}
    walls: list[float] = []
    tokens, same = None, True
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        outs = engine.generate(input_ids=prompts, sampling_params=asked)
        if repeat:
            walls.append(time.perf_counter() - begin)
        found = [_whole(out, new_tokens) for out in outs]
        same = same and tokens in (None, found)
        tokens = found
    meta = [out["meta_info"] for out in outs]
    rounds = [m.get("spec_verify_ct") or new_tokens for m in meta]
    lengths = [m.get("spec_accept_length") for m in meta]
    return {
        "batch": len(prompts),
        "tokens_per_s": len(prompts) * new_tokens / statistics.median(walls),
        "round_ms": [1e3 * wall / max(rounds) for wall in sorted(walls)],
        "rounds": rounds,
        "accepted": None if lengths[0] is None else sum(lengths) / len(lengths),
        "repeatable": same,
        "output_ids": tokens,
    }


def _whole(out: dict[str, Any], tokens: int) -> list[int]:
    """An answer's tokens, as many as were asked for."""
    found: list[int] = out["output_ids"]
    if len(found) != tokens:
        raise ValueError(f"an answer: expected {tokens} tokens, got {len(found)}")
    return found


def sample(engine: Any, prompts: list[list[int]], count: int) -> list[dict[str, dict[str, int]]]:
    """At temperature 1, ``count`` answers to each prompt: tokens counted by position."""
    asked = {"temperature": 1.0, "max_new_tokens": max(POSITIONS) + 1, "ignore_eos": True}
    laws = []
    for prompt in prompts:
        outs = engine.generate(input_ids=[prompt] * count, sampling_params=asked)
        counts = {str(at): Counter(str(out["output_ids"][at]) for out in outs) for at in POSITIONS}
        laws.append({at: dict(found.most_common()) for at, found in counts.items()})
    return laws


def converse(
    engine: Any, prompts: list[list[int]], turns: int, new_tokens: int
) -> list[dict[str, list[Any]]]:
    """Each answer goes into its conversation's next prompt: prompts, answers, cached tokens."""
    numbers = random.Random(1)
    held = [list(prompt) for prompt in prompts]
    talks: list[dict[str, list[Any]]] = [
        {"cached": [], "output_ids": [], "prompts": []} for _ in prompts
    ]
    asked = {**GREEDY, "max_new_tokens": new_tokens}
    for _ in range(turns):
        outs = engine.generate(input_ids=held, sampling_params=asked)
        question = [numbers.choice(prompts[0]) for _ in range(24)]
        for history, talk, out in zip(held, talks, outs, strict=True):
            talk["prompts"].append(list(history))
            talk["cached"].append(out["meta_info"]["cached_tokens"])
            talk["output_ids"].append(_whole(out, new_tokens))
            history += out["output_ids"] + question
    return talks

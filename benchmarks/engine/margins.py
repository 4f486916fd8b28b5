"""How clearly plain decoding preferred each token that it answered with under load."""

import math
from typing import Any

from benchmarks.engine.measures import GREEDY

__all__ = ["measure_leads"]


def measure_leads(
    engine: Any, prompts: list[list[int]], answers: list[list[int]]
) -> list[list[float]]:
    """The lead of the best log-probability over the second at each position of each answer.

    Infinite where the answer's token is neither. Another batch may break a tie the other way;
    from there on the engine is asked again, with the answer's own token.
    """
    leads: list[list[float]] = [[] for _ in prompts]
    while left := [i for i, answer in enumerate(answers) if len(leads[i]) < len(answer)]:
        outs = engine.generate(
            input_ids=[prompts[i] + answers[i][: len(leads[i])] for i in left],
            sampling_params=[
                {**GREEDY, "max_new_tokens": len(answers[i]) - len(leads[i])} for i in left
            ],
            return_logprob=True,
            top_logprobs_num=2,
        )
        for i, out in zip(left, outs, strict=True):
            tops = out["meta_info"]["output_top_logprobs"]
            want = answers[i][len(leads[i]) :]
            for token, got, top in zip(want, out["output_ids"], tops, strict=True):
                (best, one, *_), (second, other, *_) = top
                known = token in (one, other)
                leads[i].append(round(best - second, 4) if known else math.inf)
                if token != got:
                    break
    return leads

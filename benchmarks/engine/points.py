"""Decoding at one batch size and context: what a user waits for after the prompts are read.

``python points.py POINTS`` prints what an engine needs for them: requests at once, tokens of a
context, tokens in the cache.

A point's prompts go to the engine as one request, which reads all of them before it decodes any.
The time is from the last prompt's first token to the last answer's end, so prefill is not in it.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine.measures import GREEDY

__all__ = ["PointError", "list_points", "main", "measure_points", "measure_speed"]

ROOM = 1024  # tokens of a request after its prompt
Clock = Callable[[], float]
Prompts = list[list[int]]
Record = dict[str, Any]


class PointError(RuntimeError):
    """A point whose requests were not answered as asked; its time would be of other work."""


def list_points(said: str) -> list[tuple[int, int]]:
    """``1024:1,4 8192:1`` -> context and batch of every point. Raises ValueError."""
    points = []
    for part in said.split():
        context, colon, batches = part.partition(":")
        if not colon:
            raise ValueError(f"contexts: expected TOKENS:BATCH,BATCH ..., got {part!r}")
        points += [(int(context), int(batch)) for batch in batches.split(",")]
    return points


def measure_points(
    engine: Any,
    points: list[tuple[int, int]],
    draw: Callable[[int, int], Prompts],
    *,
    new_tokens: int,
    repeats: int,
) -> list[Record]:
    """Every point's speed, and what the probe saw in it.

    ``draw(batch, context)`` gives prompts. The shortest context is measured ``repeats`` times, the
    others once: they cost a prefill each. Their spread is that of the rounds, by the probe. What
    an engine compiles late it compiles in a run of each context's first batch, not counted.
    """
    shortest = min(context for context, _ in points)
    warm: set[int] = set()
    runs = []
    for context, batch in points:
        if context not in warm:
            measure_speed(engine, draw(batch, context), new_tokens, 1)
            read_probe(engine)
            warm.add(context)
        count = repeats if context == shortest else 1
        run = measure_speed(engine, draw(batch, context), new_tokens, count)
        runs.append({"context": context, **run, "probe": read_probe(engine)})
    return runs


def read_probe(engine: Any) -> Record:
    """Times since the probe was last read; probe.py says which."""
    state = engine.get_server_info()["internal_states"][0]
    return state.get("probe") or {}


def measure_speed(
    engine: Any,
    prompts: Prompts,
    new_tokens: int,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> Record:
    """Tokens a second of a batch, prefill left out. PointError where a request was cut short."""
    asked = {**GREEDY, "max_new_tokens": new_tokens}
    speeds, waits, rounds, lengths = [], [], 0, []
    for _ in range(repeats):
        made, seconds, metas = _decode(engine, prompts, asked, clock)
        speeds.append(made / seconds)
        waits.append(seconds)
        rounds = max(meta.get("spec_verify_ct") or new_tokens - 1 for meta in metas)
        lengths += [meta["spec_accept_length"] for meta in metas if meta.get("spec_verify_ct")]
    return {
        "batch": len(prompts),
        "tokens_per_s": statistics.median(speeds),
        "speeds": sorted(speeds),
        "seconds": statistics.median(waits),
        "rounds": rounds,
        "accepted": statistics.fmean(lengths) if lengths else None,
    }


def _decode(
    engine: Any, prompts: Prompts, asked: dict[str, Any], clock: Clock
) -> tuple[int, float, list[Record]]:
    """Tokens after each answer's first ones, the seconds they took, what is said of each answer.

    With a long ``stream_interval`` the engine sends the first token at once and then the rest.
    """
    begun: dict[int, tuple[float, int]] = {}
    lengths, metas = [0] * len(prompts), [Record()] * len(prompts)
    end = 0.0
    for chunk in engine.generate(input_ids=prompts, sampling_params=asked, stream=True):
        end, at = clock(), chunk["index"]
        # the engine's list may grow under the reader's hand
        lengths[at], metas[at] = len(chunk["output_ids"]), chunk["meta_info"]
        if lengths[at]:
            begun.setdefault(at, (end, lengths[at]))
    for length, meta in zip(lengths, metas, strict=True):
        reason = (meta.get("finish_reason") or {}).get("type")
        again = meta.get("num_retractions", 0)
        if length != asked["max_new_tokens"] or reason != "length" or again:
            raise PointError(
                f"batch {len(prompts)}: expected {asked['max_new_tokens']} tokens at one go, got "
                f"{length}, ended by {reason}, begun again {again} times"
            )
    start = max(time for time, _ in begun.values())
    made = sum(lengths) - sum(count for _, count in begun.values())
    return made, end - start, metas


def main() -> None:
    """Print requests, context and cache for the points."""
    points = list_points(sys.argv[1])
    context, batch = (max(found) for found in zip(*points, strict=True))
    tokens = max(batch * (context + ROOM) for context, batch in points)
    print(batch, context + ROOM, tokens)


if __name__ == "__main__":
    main()

"""Conversations held with one engine at their own times: what requests waited for and found."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.measures import GREEDY
from benchmarks.serving.talks import Talk

__all__ = ["Request", "RequestError", "offer"]

Clock = Callable[[], float]


class RequestError(RuntimeError):
    """A request that was not answered in full; the run's figures would be of other work."""


@dataclass(frozen=True)
class Request:
    """One turn; times in seconds from the run's begin."""

    talk: int
    turn: int
    due: float  # arrival, or the answer before and the time to think
    sent: float
    first: float  # the first chunk that holds a token
    end: float
    prompt_tokens: int
    cached_tokens: int
    retractions: int
    rounds: int  # verify forwards, 0 in plain decoding
    output_ids: list[int]


async def offer(
    engine: Any, talks: Sequence[Talk], clock: Clock = time.perf_counter
) -> list[Request]:
    """Hold all conversations, by number and turn; raises RequestError and holds no more."""
    begin = clock()
    tasks = [
        asyncio.ensure_future(_hold(engine, number, talk, lambda: clock() - begin))
        for number, talk in enumerate(talks)
    ]
    try:
        held = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [request for requests in held for request in requests]


async def _hold(engine: Any, number: int, talk: Talk, clock: Clock) -> list[Request]:
    """One conversation: the engine's own answers go into its next prompt."""
    requests: list[Request] = []
    due = talk.arrival_s
    for at, turn in enumerate(talk.turns):
        due += turn.think_s
        await asyncio.sleep(max(0.0, due - clock()))
        prompt = talk.prompt([request.output_ids for request in requests])
        said: dict[str, Any] = {"talk": number, "turn": at, "due": due, "sent": clock()}
        try:
            said |= await _ask(engine, prompt, turn.answer_tokens, clock)
        except Exception as error:
            raise RequestError(f"conversation {number}, turn {at}: {error}") from error
        requests.append(Request(**said))
        due = requests[-1].end
    return requests


async def _ask(engine: Any, prompt: list[int], tokens: int, clock: Clock) -> dict[str, Any]:
    """What the answer's stream shows; ValueError where it is not ``tokens`` long."""
    asked = {**GREEDY, "max_new_tokens": tokens}
    stream = await engine.async_generate(input_ids=prompt, sampling_params=asked, stream=True)
    first = end = None
    chunk: dict[str, Any] = {"output_ids": [], "meta_info": {}}
    async for chunk in stream:
        end = clock()
        if first is None and chunk["output_ids"]:
            first = end
    meta = chunk["meta_info"]
    # the engine reports a request that it gave up as a last chunk, not as an exception
    if len(chunk["output_ids"]) != tokens or meta["finish_reason"]["type"] != "length":
        raise ValueError(
            f"expected {tokens} tokens, got {len(chunk['output_ids'])}; "
            f"the engine says: {meta.get('finish_reason')}"
        )
    return {
        "first": first,
        "end": end,
        "prompt_tokens": meta["prompt_tokens"],
        "cached_tokens": meta["cached_tokens"],
        "retractions": meta["num_retractions"],
        "rounds": meta.get("spec_verify_ct") or 0,
        "output_ids": list(chunk["output_ids"]),
    }

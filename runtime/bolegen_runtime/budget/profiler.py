# mypy: allow-untyped-calls
"""Measures a target's passes, bucket by bucket, and finds how many nodes are nearly free."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bolegen_runtime.arguments import expect_kind, expect_number, expect_whole
from bolegen_runtime.budget.profile import DECIMALS, Environment, Profile, ProfileEntry

__all__ = ["Clock", "CudaClock", "Pass", "profile_target"]

Clock = Callable[[Callable[[], object]], Sequence[float]]
"""Runs what it is given, again and again, and says how many milliseconds each time took."""


@dataclass(frozen=True)
class Pass:
    """One whole target pass: ``batch`` requests with ``context`` tokens before the round.

    template: the draft tree; None is one-token decode. nodes: of all requests, roots included,
    a multiple of the batch.
    """

    batch: int
    context: int
    template: str | None
    nodes: int


_MOST_REPLAYS = 1_000_000  # each has an event of its own


class CudaClock:
    """Times replays of a CUDA graph between events.

    replays: how many are timed, at most 1,000,000. graph: False launches eagerly, for a pass that
    cannot be captured.
    """

    def __init__(self, *, replays: int = 20, graph: bool = True) -> None:
        self._replays = expect_whole("replays", replays, 1, _MOST_REPLAYS)
        expect_kind("graph", graph, bool, "True or False")
        self._graph = graph

    def __call__(self, run: Callable[[], object]) -> list[float]:
        """Milliseconds of each replay, after two runs that compile and two that warm up."""
        _expect_callable("run", run, "a function without arguments")
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        again = self._capture(run) if self._graph else run
        for _ in range(2):
            again()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self._replays + 1)]
        events[0].record()
        for event in events[1:]:
            again()
            event.record()
        events[-1].synchronize()
        return [float(start.elapsed_time(end)) for start, end in itertools.pairwise(events)]

    def _capture(self, run: Callable[[], object]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def profile_target(
    prepare: Callable[[Pass], Callable[[], object]],
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    templates: Mapping[str, Sequence[int]],
    epsilon: float = 0.1,
    target: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    device: torch.device | str = "cuda",
    progress: Callable[[list[tuple[int, int]]], Iterable[tuple[int, int]]] | None = None,
) -> Profile:
    """Time one-token decode and every template at every size, for each batch and context.

    prepare: makes a pass ready and returns what runs it, over buffers of its own; it must allow a
    capture where the clock captures. templates: nodes a request to try, by template. epsilon: how
    much longer than one-token decode a pass may take. target: facts that Profile keeps. clock:
    None is CudaClock(). progress: wraps the buckets, as tqdm.tqdm does; None is silent.
    Decode is timed before and after the trees of a bucket, so that a drift of the device's clocks
    counts for both. Raises ValueError for sizes below 1, and what prepare and the clock raise.
    """
    batches, contexts = _read_sizes("batches", batches), _read_sizes("contexts", contexts)
    widths = _read_templates(templates)
    _expect_callable("prepare", prepare, "a function of a Pass")
    epsilon = expect_number("epsilon", epsilon)
    # what cannot be kept is refused before hours of measuring
    facts = {} if target is None else target
    clock, known = clock or CudaClock(), Profile(Environment.current(device), facts, ())
    buckets = list(itertools.product(batches, contexts))
    entries: list[ProfileEntry] = []
    for batch, context in progress(buckets) if progress else buckets:
        decode = Pass(batch, context, None, batch)
        decode_ms = _time(clock, prepare(decode))
        trees = {
            name: _measure(prepare, clock, batch, context, name, tried)
            for name, tried in widths.items()
        }
        decode_ms += _time(clock, prepare(decode))
        entries += [
            ProfileEntry(batch, context, name, epsilon, _median(decode_ms), *times)
            for name, times in trees.items()
        ]
    return replace(known, target=dict(known.target), entries=tuple(entries))


def _expect_callable(name: str, value: object, said: str) -> None:
    if not callable(value):
        raise ValueError(f"{name}: expected {said}, got {value!r:.40}")


def _read_templates(templates: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(templates, Mapping) or not templates:
        raise ValueError(f"templates: expected sizes by template, got {templates!r:.60}")
    for name in templates:
        if not isinstance(name, str):
            raise ValueError(f"templates: expected names, got {name!r:.60}")
    return {name: _read_sizes("templates", sizes) for name, sizes in templates.items()}


def _read_sizes(name: str, sizes: object) -> tuple[int, ...]:
    """Each once, the smallest first, as Python's own integers."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str | bytes) or not sizes:
        raise ValueError(f"{name}: expected sizes from 1, got {sizes!r:.60}")
    return tuple(sorted({expect_whole(name, size, 1) for size in sizes}))


def _time(clock: Clock, run: Callable[[], object]) -> list[float]:
    times = [float(time) for time in clock(run)]
    if not times:
        raise ValueError("clock: expected milliseconds of each run, got none")
    return times


Times = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def _measure(
    prepare: Callable[[Pass], Callable[[], object]],
    clock: Clock,
    batch: int,
    context: int,
    template: str,
    widths: Sequence[int],
) -> Times:
    """Totals, and the median, least and most milliseconds of each."""
    totals = tuple(batch * width for width in widths)
    taken = [_time(clock, prepare(Pass(batch, context, template, total))) for total in totals]
    medians, least, most = (
        tuple(round(f(times), DECIMALS) for times in taken) for f in (statistics.median, min, max)
    )
    return totals, medians, least, most


def _median(times: Sequence[float]) -> float:
    return round(statistics.median(times), DECIMALS)

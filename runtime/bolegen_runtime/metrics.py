"""What a server counts: accepted lengths, nodes, budgets, times, fallbacks, for Prometheus.

A round costs one small launch and no wait; what it counts stays on the device until it is read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Literal

import torch
import triton

from bolegen_runtime.arguments import (
    INTEGERS,
    expect_device,
    expect_kind,
    expect_module,
    expect_tensor,
    expect_whole,
)
from bolegen_runtime.counters import LENGTHS, count_requests
from bolegen_runtime.exposition import Family, Histogram, expose

__all__ = ["Metrics", "expose_metrics"]

SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)
NODES = tuple(1 << i for i in range(14))
PENDING = 1024  # times that the device has not finished yet; older ones are dropped and counted
HELP = {
    "bolegen_rounds_total": "Rounds counted.",
    "bolegen_requests_total": "Requests in them, padded rows left out.",
    "bolegen_offered_nodes_total": "Nodes that those requests had room for.",
    "bolegen_live_nodes_total": "Nodes of those that were verified.",
    "bolegen_accepted_length_nodes": "Nodes committed by a request in a round, root included.",
    "bolegen_budget_nodes": "Nodes that the planner was given for a batch.",
    "bolegen_verify_seconds": "Time of verify over all layers, on the device.",
    "bolegen_commit_seconds": "Time of commit over all layers, on the device.",
    "bolegen_dropped_timings_total": "Times left out since too many were unfinished.",
    "bolegen_fallbacks_total": "Rounds that were not verified as trees, by reason.",
}

Timed = Literal["verify", "commit"]


class Metrics:
    """Counters of one module on one device; ``count_round`` may be captured in a CUDA graph."""

    def __init__(self, module: ModuleType, device: torch.device | str) -> None:
        expect_module(module)
        m, device = module.MODULE, expect_device(device)
        self.labels = {"module": m.name, "device": str(device)}
        self._device = device
        self._factors = module.Factors
        self._nodes, self._depth = m.nodes, m.depth
        self._counts = torch.zeros(LENGTHS + m.depth + 2, dtype=torch.int64, device=device)
        self._parents = None
        if m.parents is not None:
            self._parents = torch.tensor(m.parents, dtype=torch.int32, device=device)
        self._budgets = Histogram(NODES)
        self._times = {"verify": Histogram(SECONDS), "commit": Histogram(SECONDS)}
        self._fallbacks: Counter[str] = Counter()
        self._dropped = 0
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def count_round(
        self,
        factors: Any,
        slots: torch.Tensor,
        last_node: torch.Tensor,
        *,
        nodes: int | None = None,
    ) -> None:
        """Count a round that was verified into ``factors``: one launch, nothing is waited for.

        slots and last_node [B] as commit takes them; ``nodes``: of each request, the module's by
        default. Raises ValueError where the two differ in length or from the factors' batch, for
        a dtype, device or stride, and for factors of another module.
        """
        nodes = self._check(factors, slots, last_node, nodes)
        rows = slots.shape[0]
        if rows == 0:
            return
        static = self._parents is not None
        cuda = slots.is_cuda
        with torch.cuda.device(slots.device) if cuda else nullcontext():
            count_requests[(rows,)](
                self._counts, slots, last_node, factors.live,
                self._parents if static else factors.parents, 0 if static else self._nodes,
                nodes, T=self._nodes, DEPTH=self._depth,
                WIDTH=triton.next_power_of_2(self._nodes), num_warps=1,
            )  # fmt: skip

    def _check(self, factors: Any, slots: Any, last_node: Any, nodes: int | None) -> int:
        """The nodes of each request, once everything is what the kernel takes."""
        where = self._counts.device
        if type(factors) is not self._factors:
            raise ValueError(
                f"factors: expected those of {self.labels['module']}, got "
                f"{type(factors).__name__} of {type(factors).__module__}"
            )
        expect_tensor("factors", factors.live, (None, self._nodes), (factors.live.dtype,), where)
        expect_tensor("slots", slots, (None,), INTEGERS, where, unit=True)
        expect_tensor("last_node", last_node, tuple(slots.shape), INTEGERS, where, unit=True)
        if slots.shape[0] > factors.batch:
            raise ValueError(f"slots: expected at most {factors.batch} rows, got {slots.shape[0]}")
        return expect_whole("nodes", self._nodes if nodes is None else nodes, 1, self._nodes)

    def count_budget(self, nodes: int) -> None:
        """The node total that was chosen for a batch."""
        nodes = expect_whole("nodes", nodes, 0)
        with self._lock:
            self._budgets.add(nodes)

    def count_fallback(self, reason: str) -> None:
        """A round that ran without a tree; few different reasons, since each is a series."""
        if not isinstance(reason, str):
            raise ValueError(f"reason: expected words, got {reason!r}")
        with self._lock:
            self._fallbacks[reason] += 1

    @contextmanager
    def time(self, what: Timed) -> Iterator[None]:
        """Time what is launched inside, on the device and without waiting for it.

        Raises RuntimeError during a capture: time its replays; ValueError for another word.
        """
        if what not in ("verify", "commit"):
            raise ValueError(f"what: expected verify or commit, got {what!r:.40}")
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            with self._lock:
                self._times[what].add(time.perf_counter() - start)
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"time({what!r}): expected outside of a capture; time its replays")
        with self._lock:
            events = [self._free.pop() if self._free else _event() for _ in range(2)]
        events[0].record()
        yield
        events[1].record()
        with self._lock:
            self._pending.append((what, *events))
            self._collect()

    def snapshot(self) -> dict[str, Any]:
        """Every figure by its Prometheus name; waits for the device's current stream.

        A histogram is a dict of buckets (upper bound: how many in all up to it), sum and count.
        """
        return {family.name: family.value for family in self.families()}

    def families(self) -> list[Family]:
        """Every figure with its help and type, as exposed."""
        counts = self._counts.tolist()
        lengths = Histogram(tuple(range(self._depth + 2)), counts[LENGTHS:])
        with self._lock:
            self._collect()
            values = [
                *counts[:LENGTHS], lengths, self._budgets, self._times["verify"],
                self._times["commit"], self._dropped, dict(self._fallbacks),
            ]  # fmt: skip
            return [
                Family(name, said, value.read() if isinstance(value, Histogram) else value)
                for (name, said), value in zip(HELP.items(), values, strict=True)
            ]

    def _collect(self) -> None:
        """Take in the times that the device has finished."""
        while self._pending and self._pending[0][2].query():
            what, start, end = self._pending.popleft()
            self._times[what].add(start.elapsed_time(end) / 1000)
            self._free += [start, end]
        while len(self._pending) > PENDING:
            self._free += self._pending.popleft()[1:]
            self._dropped += 1


def expose_metrics(*metrics: Metrics) -> str:
    """Prometheus' text format 0.0.4; figures carry the names of module and device as labels.

    Raises ValueError for two of one module and device, which could not be told apart.
    """
    for each in metrics:
        expect_kind("metrics", each, Metrics)
    told = [tuple(each.labels.items()) for each in metrics]
    if len(set(told)) < len(told):
        raise ValueError("metrics: expected one for each module and device; add theirs up first")
    return expose([(each.labels, each.families()) for each in metrics])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

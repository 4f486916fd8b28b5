# mypy: allow-untyped-calls
"""Time a system by graph replays, after it was judged both in plain launches and in replays."""

import itertools
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from benchmarks.peers.fetch import FOLDER
from benchmarks.systems import System

__all__ = [
    "Timing",
    "WrongResultError",
    "count_sets",
    "describe",
    "judge",
    "kernel_times",
    "measure",
    "replay_times",
    "spin_up",
]

_L2_BYTES = 60 << 20
_TARGET_MS = 12.0
_REPLAYS = (7, 40)


class WrongResultError(Exception):
    """A system's answer is over its limit: its speed means nothing."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call (a layer, unless it covers all), over replays of a graph."""

    median_us: float
    least_us: float
    most_us: float
    replays: int

    @property
    def record(self) -> dict[str, float]:
        """Its fields in a JSON line."""
        return {
            "us": round(self.median_us, 3),
            "min_us": round(self.least_us, 3),
            "max_us": round(self.most_us, 3),
            "replays": self.replays,
        }


def count_sets(state_bytes: int) -> int:
    """Sets of operands whose states together are three times the L2 cache, at least 3."""
    return max(3, min(96, -(-3 * _L2_BYTES // state_bytes)))


def judge(system: System, layer: int, output: torch.Tensor) -> dict[str, float]:
    """Error over limit by quantity; WrongResultError where one is over 1."""
    found = {name: round(ratio, 4) for name, ratio in system.judge(layer, output).items()}
    if not found or max(found.values()) > 1:
        raise WrongResultError(f"{system.name}: error over limit {found}")
    return found


def measure(system: System, sets: int) -> tuple[Timing, dict[str, float]]:
    """Judge, capture, judge a replay, time, judge one more: the same bits, as right a state."""
    last = sets - 1
    system.prepare()
    outputs = [system.run(i) for i in range(sets)]
    judge(system, last, outputs[last])
    graph, outputs = _capture(system.run, sets)
    for output in outputs:
        output.fill_(torch.nan)
    system.prepare()
    graph.replay()
    torch.cuda.synchronize()
    worst = judge(system, last, outputs[last])
    kept = outputs[last].clone()
    timing = _time(graph, sets)
    system.prepare()
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(outputs[last], kept):
        raise WrongResultError(f"{system.name}: a replay differs from the first")
    judge(system, last, outputs[last])
    return timing, worst


def replay_times(run: Callable[[int], Any], sets: int = 1) -> Timing:
    """Time calls that nothing judges."""
    run(0)
    torch.cuda.synchronize()
    graph, _kept = _capture(run, sets)
    return _time(graph, sets)


def _capture(run: Callable[[int], Any], sets: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    # not torch.cuda.graph(), which first gives all cached memory back to the driver
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            outputs = [run(i) for i in range(sets)]
        finally:
            graph.capture_end()
    return graph, outputs


def _time(graph: torch.cuda.CUDAGraph, sets: int) -> Timing:
    for _ in range(2):
        graph.replay()
    low, high = _REPLAYS
    once = _replay(graph, 1)[0]
    count = int(max(low, min(high, _TARGET_MS * 1e3 / max(once, 1.0))))
    times = [each / sets for each in _replay(graph, count)]
    return Timing(statistics.median(times), min(times), max(times), count)


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Microseconds of each of ``count`` replays in a row."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [1e3 * float(start.elapsed_time(end)) for start, end in itertools.pairwise(events)]


def spin_up(seconds: float = 0.5) -> None:
    """Bring the clocks up."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def describe() -> dict[str, Any]:
    """Device and versions, for every record."""
    versions = FOLDER / "versions.json"
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "peers": json.loads(versions.read_text("utf-8")) if versions.is_file() else {},
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]


def kernel_times(system: System, sets: int) -> dict[str, float]:
    """Mean microseconds of each kernel that a system launches, one by one, by profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for i in range(sets):
            system.run(i)
        torch.cuda.synchronize()
    return {
        event.key.partition("_")[0]: round(event.device_time_total / event.count, 2)
        for event in profile.key_averages()
        if event.device_time_total
    }

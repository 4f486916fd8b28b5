"""An SGLang plugin of the benchmarks: times of a server's target passes and commits.

SGLang finds it by an entry point that run.sh writes. What it saw since it was last asked is in
``internal_states[0]["probe"]``, by batch size: microseconds on the device and of the host.
``verify`` and ``decode`` are the target's passes, ``round`` is from a pass's start to the next's.
BOLEGEN_FAULT=NAME:N lets bolegen's verify, commit or allocate raise from its Nth call on;
BOLEGEN_SNAPSHOTS=1 lets it store a state for every node; BOLEGEN_SIMULATED is of simulated.py.
"""

import importlib
import itertools
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine import simulated, snapshots

__all__ = ["register"]

KEPT, FEW = 2000, 8
FAULTS = {"verify": "verify", "commit": "commit", "allocate": "__init__"}
Call = tuple[torch.cuda.Event, torch.cuda.Event, float]
Method = Callable[..., Any]
seen: dict[tuple[str, int], deque[Call]] = defaultdict(lambda: deque(maxlen=KEPT))


def register() -> None:
    """What SGLang calls in each of its processes."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    hook, kinds = registry.HookRegistry.register, registry.HookType
    runner = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    commit = "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify"
    hook(runner, time_pass, kinds.AROUND)
    hook(commit, time_commit, kinds.AROUND)
    hook("sglang.srt.managers.scheduler.Scheduler.get_internal_state", report, kinds.AFTER)
    if os.environ.get("BOLEGEN_SNAPSHOTS") == "1":
        snapshots.install()
    if os.environ.get(simulated.KEY):
        spec = "sglang.srt.speculative.spec_utils.generate_simulated_accept_index"
        hook(spec, simulated.simulate, kinds.AROUND)
    fault = os.environ.get("BOLEGEN_FAULT")
    if fault:
        name, _, call = fault.partition(":")
        _break(name, int(call))


def time_pass(original: Method, runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    """A target's verify or decode forward, all layers; every other forward passes."""
    mode = batch.forward_mode
    what = "verify" if mode.is_target_verify() else "decode" if mode.is_decode() else None
    if runner.is_draft_worker or what is None:
        return original(runner, batch, *args, **kw)
    with _Timed(what, batch.batch_size):
        return original(runner, batch, *args, **kw)


def time_commit(original: Method, worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    """The commit of accepted states of all layers, its indices included."""
    with _Timed("commit", len(batch.seq_lens)):
        return original(worker, batch, *args, **kw)


class _Timed:
    """Events on the current stream around a block."""

    def __init__(self, what: str, batch: int) -> None:
        self.key = what, batch

    def __enter__(self) -> None:
        self.start = _mark()
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.began
        end = _mark()
        if not torch.cuda.is_current_stream_capturing():
            seen[self.key].append((self.start, end, spent))


def _mark() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def report(result: Any, *_: Any, **__: Any) -> Any:
    """Quartiles on the device, the host's median, calls seen; waits for the device."""
    torch.cuda.synchronize()
    said: dict[str, dict[str, Any]] = {}
    for (what, batch), calls in sorted(seen.items()):
        device = [1e3 * start.elapsed_time(end) for start, end, _ in calls]
        _say(said, what, batch, device, [1e6 * spent for *_, spent in calls])
        if what != "commit":
            starts = [start for start, *_ in calls]
            gaps = [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(starts)]
            _say(said, "round", batch, gaps, [])
    seen.clear()
    result.internal_state["probe"] = said
    return result


def _say(
    said: dict[str, dict[str, Any]], what: str, batch: int, device: list[float], host: list[float]
) -> None:
    if len(device) < FEW:
        return
    said.setdefault(what, {})[str(batch)] = {
        "device": [round(t, 1) for t in statistics.quantiles(device, n=4)],
        "calls": len(device),
        **({"host": round(statistics.median(host), 1)} if host else {}),
    }


def _break(name: str, call: int) -> None:
    """From its ``call``th call on, a method of the plugin's verifier raises."""
    verifier = importlib.import_module("bolegen_runtime.sglang.verifier").TreeVerifier
    method = FAULTS[name]
    original = getattr(verifier, method)
    calls = 0

    def broken(*args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise RuntimeError(f"injected fault: {name}, call {calls}")
        return original(*args, **kw)

    setattr(verifier, method, broken)

"""What part of a target pass its linear layers take, from SGLang's own profiler.

The engine decodes as it does when it is timed: the pass is one replay of a CUDA graph, whose
kernels the profiler times on the device; all of them bear the replay's correlation. Prefill,
drafting and commit lie outside of that graph.

Of a linear layer the *core* is counted: convolution, gates and recurrence, from its first such
kernel to its last, and what runs between. Projections and norms are not; the paper's 4 % at 8
nodes leaves no room for them either. Small copies that an engine makes before its convolution
are left out too, which favours SGLang. A share is the time in which a core's kernel runs over
the time in which any of the pass does.

A pass is kept kernel by kernel, so that a record can be judged anew.
"""

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["KernelError", "measure_passes", "read_pass", "share_of"]

# SGLang's verify, chain verify and decode; ours, whose module is named gdn_...
CORE = re.compile(
    r"causal_conv1d_update|fused_qkv_split_gdn|gated_delta_rule|gating_delta_rule"
    r"|gdn_gating|(trace|prepare|factor|solve)_gdn_"
)
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
BETWEEN = 2  # other kernels inside a core, at most: a layer's own are more
NEW_TOKENS = 32
Record = dict[str, Any]
Span = tuple[float, float]


class KernelError(RuntimeError):
    """A trace in which the passes of the model asked for cannot be told."""


def measure_passes(
    engine: Any,
    points: list[tuple[int, int]],
    draw: Callable[[int, int], list[list[int]]],
    layers: int,
) -> list[Record]:
    """A target pass at each context and batch, in a model of ``layers`` linear layers."""
    asked = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    passes = []
    for context, batch in points:
        with tempfile.TemporaryDirectory() as folder:
            engine.start_profile(
                output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False
            )
            engine.generate(input_ids=draw(batch, context), sampling_params=asked)
            engine.stop_profile()
            files = sorted(Path(folder).glob("*.json.gz"))
            if len(files) != 1:
                raise KernelError(f"profiler: expected one trace, got {[f.name for f in files]}")
            events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
        passes.append({"batch": batch, "context": context, **read_pass(events, layers)})
    return passes


def read_pass(events: list[Record], layers: int) -> Record:
    """The target's replay of median device time: kernels in order, names in a table, us from
    the first one's start. KernelError where no replay has ``layers`` cores.
    """
    launches: dict[int, list[Record]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_DEVICE:
            launches[event.get("args", {}).get("correlation", -1)].append(event)
    found, seen = [], set()
    for held in launches.values():
        ordered = sorted(held, key=lambda event: float(event["ts"]))
        calls = _calls(ordered)
        cores = len(find_cores([name for name, *_ in calls]))
        seen.add(cores)
        if cores == layers:
            found.append(calls)
    if not found:
        raise KernelError(
            f"trace: expected replays with {layers} linear layers, got {len(launches)} launches "
            f"with {sorted(seen)}"
        )
    found.sort(key=lambda calls: busy_us([(at, at + us) for _, at, us in calls]))
    kept = found[len(found) // 2]
    names = list(dict.fromkeys(name for name, *_ in kept))
    return {
        "passes": len(found),
        "layers": layers,
        "names": names,
        "calls": [[names.index(name), round(at, 2), us] for name, at, us in kept],
    }


def _calls(events: list[Record]) -> list[tuple[str, float, float]]:
    begin = float(events[0]["ts"])
    return [(e["name"], float(e["ts"]) - begin, float(e["dur"])) for e in events]


def find_cores(names: list[str]) -> list[tuple[int, int]]:
    """First and last kernel of every linear layer's core."""
    cores: list[tuple[int, int]] = []
    for at, name in enumerate(names):
        if not CORE.search(name):
            continue
        if cores and at - cores[-1][1] <= BETWEEN + 1:
            cores[-1] = (cores[-1][0], at)
        else:
            cores.append((at, at))
    return cores


def busy_us(spans: list[Span]) -> float:
    """The time that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def share_of(kept: Record) -> tuple[float, float]:
    """Microseconds of the cores and of the whole pass."""
    spans = [(at, at + us) for _, at, us in kept["calls"]]
    cores = find_cores([kept["names"][i] for i, *_ in kept["calls"]])
    return busy_us([span for a, b in cores for span in spans[a : b + 1]]), busy_us(spans)

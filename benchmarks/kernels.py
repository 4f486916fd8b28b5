# mypy: allow-untyped-calls
"""Time the checked-in modules kernel by kernel: correctness first, then microseconds a layer.

``python benchmarks/kernels.py`` writes one JSON line a module and batch to docs/kernels.jsonl,
and from that file the table of docs/kernels.md (``--render`` alone does the latter). Times are
ours alone, for the log of what was changed; they say nothing about other verifiers.
One CUDA graph holds a verify on each of several states, so that the L2 cache serves none.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

import networkx as nx  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

from bolegen.checked import compile_all  # noqa: E402
from support.rounds import Round, check_verify, import_module, make_round  # noqa: E402

__all__ = ["main"]

_BATCHES = (1, 8, 32)
_REPLAYS = 15
_STAGES = ("trace", "prepare", "factor", "solve")


def main() -> None:
    """Every checked-in module at every batch; stops at the first that breaks the contract."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/kernels.jsonl")
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args()
    if not options.render:
        with options.out.open("w", encoding="utf-8") as file:
            for emitted in compile_all():
                m = import_module(emitted)
                for batch in _BATCHES:
                    record = _versions() | _measure(m, batch)
                    print(json.dumps(record), flush=True)
                    file.write(json.dumps(record) + "\n")
    records = [json.loads(line) for line in options.out.read_text("utf-8").splitlines()]
    options.out.with_suffix(".md").write_text(_render(records), "utf-8")


def _render(records: list[dict[str, Any]]) -> str:
    """The table for people."""
    first = records[0]
    where = f"{first['device']}, torch {first['torch']}, Triton {first['triton']}"
    lines = [
        "# What each kernel costs",
        "",
        f"Microseconds a layer on {where}.",
        "Written by `make bench`, after each module had passed the exactness contract.",
        "The whole of verify is the median of CUDA-graph replays over rotating states, with the",
        "least and the most; kernels are timed one by one.",
        "These are our own times, to see what a change does. Nothing here is a speed-up.",
        "",
        "| module | B | verify | least to most | " + " | ".join(_STAGES) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(_STAGES),
    ]
    for record in records:
        low, high = record["spread_us"]
        kernels = [str(record["kernels_us"].get(stage, "")) for stage in _STAGES]
        cells = [record["module"], record["batch"], record["verify_us"], f"{low} to {high}"]
        lines.append(f"| {' | '.join(map(str, [*cells, *kernels]))} |")
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _measure(m: ModuleType, batch: int) -> dict[str, Any]:
    """Medians in microseconds a layer: the whole of verify in a graph, and each kernel."""
    layers = max(3, 96 // batch)
    r = _round(m, batch, layers)
    factors = m.allocate(batch, layers, "cuda")
    outs = [r.verify(m, factors, layer) for layer in range(layers)]
    check_verify(m, r, outs[-1], factors, layers - 1).assert_within()
    factors.check = False

    def step() -> None:
        for layer in range(layers):
            r.verify(m, factors, layer, out=outs[layer])

    times = _replay(step, layers)
    return {
        "module": m.MODULE.name,
        "digest": m.MODULE.digest,
        "batch": batch,
        "layers": layers,
        "verify_us": round(statistics.median(times), 2),
        "spread_us": [round(min(times), 2), round(max(times), 2)],
        "kernels_us": _kernels(step),
    }


def _round(m: ModuleType, batch: int, layers: int) -> Round:
    """Operands at the module's own shapes; random trees of its depth where it takes any."""
    trees = None
    if m.MODULE.parents is None:
        trees = [_tree(m.MODULE.nodes, m.MODULE.depth, seed) for seed in range(batch)]
    return make_round(m, batch=batch, layers=layers, slots=batch, trees=trees, device="cuda")


def _tree(nodes: int, depth: int, seed: int) -> list[int]:
    """A random recursive tree; what would lie too deep hangs from the root instead."""
    tree = nx.bfs_tree(nx.random_labeled_rooted_tree(nodes, seed=seed), 0)
    parents, levels = [-1], [0]
    index = {0: 0}
    for parent, child in nx.bfs_edges(tree, 0):
        above = index[parent] if levels[index[parent]] < depth else 0
        index[child] = len(parents)
        parents.append(above)
        levels.append(levels[above] + 1)
    parents += [0] * (nodes - len(parents))
    return parents


def _replay(step: Any, layers: int) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers)
    return times


def _kernels(step: Any) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found = {}
    for event in profile.key_averages():
        stage = event.key.partition("_")[0]
        if stage in _STAGES:
            found[stage] = round(event.device_time_total / event.count, 2)
    return found


if __name__ == "__main__":
    main()

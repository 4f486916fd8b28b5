# mypy: allow-untyped-calls
"""Memory of a round as torch's allocator counts it, beside snapshots of SGLang's shapes.

``python benchmarks/memory.py`` on a GPU: appends to docs/memory.jsonl and writes the tables of
docs/memory.md. ``--render`` only writes the tables.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.pages import fill, table  # noqa: E402
from bolegen.codegen import compile_plan, plan_template  # noqa: E402
from bolegen.ir import LayerSpec  # noqa: E402
from bolegen.memory import MemoryPlan, plan_memory  # noqa: E402
from support.rounds import check_commit, check_verify, import_module, make_round  # noqa: E402

__all__ = ["WANTED", "fill_page", "main", "measure", "sglang_shapes", "tables"]

Line = dict[str, Any]
LINES, PAGE = ROOT / "docs/memory.jsonl", ROOT / "docs/memory.md"
BATCH, TEMPLATE = 8, "(3,3,3)"
LOGGED_GIB = 4.22 + 0.10  # SGLang 0.5.17's log line: six layers, 8 requests of 40 nodes
WANTED = 120.0  # times smaller than that
REPEATS = 3


def main() -> int:
    """0 where the round was right, the allocator agreed with the plan and WANTED was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only write the tables")
    options = parser.parse_args()
    start = time.monotonic()
    if not options.render:
        if not torch.cuda.is_available():
            raise SystemExit("bolegen: no CUDA device here; the allocator is the GPU's")
        found = [measure(layers, factors) for layers in (6, 24) for factors in ("replay", "pku")]
        with LINES.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in found)
    lines = [json.loads(line) for line in LINES.read_text("utf-8").splitlines()]
    PAGE.write_text(fill_page(PAGE.read_text("utf-8"), lines), "utf-8")
    print(tables(lines), f"{time.monotonic() - start:.0f} s")
    bad = [line for line in lines if line["layout"] == "replay" and line["times"] < WANTED]
    return 1 if bad else 0


def measure(layers: int, factors: str) -> Line:
    """One line: bytes asked of the allocator and handed out, the same each time."""
    spec = LayerSpec(factors=factors)
    plan = plan_template(TEMPLATE, spec, depth=8)
    m = import_module(compile_plan(plan))
    memory = plan_memory(plan, layers=layers, batch=BATCH)
    said = play(m, memory, "cuda")
    made = {_bytes_of(lambda: m.allocate(BATCH, layers, "cuda")) for _ in range(REPEATS)}
    kept = {_bytes_of(lambda: sglang_shapes(memory)) for _ in range(REPEATS)}
    assert len(made) == len(kept) == 1, f"the allocator varies: {made}, {kept}"
    (asked, handed), (theirs, _) = made.pop(), kept.pop()
    planned = memory.factors.total + memory.scratch.total
    assert asked == planned, f"allocate took {asked} bytes, the plan says {planned}"
    assert theirs == memory.snapshots.total // BATCH * (BATCH + 1)
    line = {
        "layers": layers, "batch": BATCH, "nodes": plan.tree.nodes, "layout": factors,
        "factors": memory.factors.total, "scratch": memory.scratch.total, "handed_out": handed,
        "sglang": theirs, "times": theirs / memory.factors.total,
        "snapshots": memory.snapshots.total,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "repeats": REPEATS, "spread": 0, **said,
    }  # fmt: skip
    if layers == 6 and factors == "replay":
        line["times_logged"] = LOGGED_GIB * (1 << 30) / memory.factors.total
    return line


def play(m: Any, memory: MemoryPlan, device: str) -> Line:
    """Verify every layer and commit, judged; a second round allocates nothing."""
    spec, layers, batch = memory.plan.spec, memory.layers, memory.batch
    r = make_round(m, batch=batch, slots=batch + 1, device=device)
    factors = m.allocate(batch, layers, device)
    out = r.x.new_empty(*r.x.shape[1:3], spec.value_heads, spec.d_v)
    before = r.state.clone(), r.conv_state.clone()
    states, windows = (pool.repeat(layers, *[1] * (pool.dim() - 1)) for pool in before)
    last = torch.full((batch,), memory.plan.tree.nodes - 1, device=device)

    def verify(layer: int) -> None:
        m.verify(r.x[0], r.a[0], r.b[0], r.conv_weight[0], r.A_log[0], r.dt_bias[0], r.state[0],
                 r.conv_state[0], r.slots, factors, layer=layer, out=out)  # fmt: skip

    for layer in range(layers):
        verify(layer)
    worst = check_verify(m, r, out, factors)
    m.commit(factors, states, windows, r.slots, last)
    worst |= check_commit(m, r, factors, before, (states[:1], windows[:1]), last.tolist())
    worst.assert_within()
    said = {"worst": round(max(worst.ratios.values()), 3)}
    if device == "cpu":
        return said
    factors.check = False
    torch.cuda.synchronize()
    count = _stat("allocation.all.allocated")
    for layer in range(layers):
        verify(layer)
    m.commit(factors, states, windows, r.slots, last)
    made = _stat("allocation.all.allocated") - count
    assert made == 0, f"a round made {made} allocations"
    return said | {"allocations": made}


def sglang_shapes(memory: MemoryPlan, device: str = "cuda") -> list[torch.Tensor]:
    """States and windows after every node, one row more than requests (its MambaPool)."""
    spec, nodes = memory.plan.spec, memory.plan.tree.nodes
    rows = (memory.layers, memory.batch + 1, nodes)
    state = (spec.value_heads, spec.d_v, spec.d_k)
    return [
        torch.empty(*rows, *state, dtype=getattr(torch, spec.state_dtype.torch), device=device),
        torch.empty(*rows, spec.channels, spec.conv - 1, device=device,
                    dtype=getattr(torch, spec.dtype.torch)),
    ]  # fmt: skip


def _bytes_of(make: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that ``make`` asked for, and that the allocator set aside for it."""
    names = ("requested_bytes.all.current", "allocated_bytes.all.current")
    torch.cuda.synchronize()
    before = [_stat(name) for name in names]
    held = make()
    after = [_stat(name) for name in names]
    del held
    asked, handed = (b - a for a, b in zip(before, after, strict=True))
    return asked, handed


def _stat(name: str) -> int:
    return int(torch.cuda.memory_stats()[name])


def fill_page(page: str, lines: list[Line]) -> str:
    """The page with its tables written anew between the markers."""
    return fill(page, "tables", tables(lines))


def tables(lines: list[Line]) -> str:
    """The last line of each layout and number of layers."""
    last = {(line["layers"], line["layout"]): line for line in lines}
    if not last:
        return "Not yet measured.\n"
    runs = {f"{x['device']}, torch {x['torch']}, Triton {x['triton']}" for x in last.values()}
    head = ["layers", "layout", "factors", "scratch of one layer", "set aside for both",
            "SGLang's shapes", "times smaller", "the same without its spare row"]  # fmt: skip
    rows = []
    for _, line in sorted(last.items()):
        cells = [str(line["layers"]), line["layout"]]
        cells += [f"{line[key]:,}" for key in ("factors", "scratch", "handed_out", "sglang")]
        cells += [f"{line['times']:.1f}", f"{line['snapshots'] / line['factors']:.1f}"]
        rows.append(cells)
    logged = [
        f"\nAgainst SGLang's own log line of {LOGGED_GIB:.2f} GiB for six layers: "
        f"{line['times_logged']:.1f} times smaller.\n"
        for line in last.values()
        if "times_logged" in line
    ]
    about = f"Measured on {'; '.join(sorted(runs))}. Bytes; the allocator sets aside whole blocks."
    return f"{about}\n\n{table(head, rows)}{''.join(logged)}"


if __name__ == "__main__":
    sys.exit(main())

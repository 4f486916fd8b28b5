"""Rounds as a server plays them, proven on this GPU; writes docs/rounds.json and docs/rounds.md.

One graph of 24 layers is replayed on other trees, slots and live nodes each time, beside the
module's own calls and the float64 oracle; then small layers are played for thousands of rounds
beside the serial recurrence. Nothing is written unless all of it holds.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

import torch  # noqa: E402

from benchmarks.pages import table  # noqa: E402
from benchmarks.rejects import play_rejects  # noqa: E402
from benchmarks.replays import play_replays  # noqa: E402
from benchmarks.timing import describe  # noqa: E402
from bolegen_runtime import Settings, load  # noqa: E402

__all__ = ["main"]


def main() -> None:
    """Play, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=1000, metavar="N")
    parser.add_argument("--rejects", type=int, default=10_000, metavar="N")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bolegen: no CUDA device here; graphs need one")
    record: dict[str, Any] = {"device": describe()}
    begin = time.monotonic()
    big = load("any:64", depth=8, settings=Settings())
    record["replays"] = play_replays(big, layers=options.layers, rounds=options.replays, judged=4)
    record["replays"]["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(record["replays"]), flush=True)
    begin = time.monotonic()
    small = load("any:16", depth=6, heads=(1, 2), dims=(32, 32), dtype="fp32", settings=Settings())
    record["rejects"] = play_rejects(small, rounds=options.rejects)
    record["rejects"]["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(record["rejects"]), flush=True)
    options.out.mkdir(exist_ok=True)
    (options.out / "rounds.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (options.out / "rounds.md").write_text(_page(record), "utf-8")


def _page(record: dict[str, Any]) -> str:
    device, replays, rejects = record["device"], record["replays"], record["rejects"]
    launches = replays["launches of a round"]
    rows = replays["rows"]

    def errors(of: dict[str, Any]) -> str:
        worst = of["worst error over its limit"]
        return ", ".join(f"{name} {ratio:.3f}" for name, ratio in sorted(worst.items()))

    found = {
        "graph": f"{replays['layers']} layers of `{replays['module']}`, batches "
        f"{', '.join(map(str, replays['batches']))}",
        "rounds replayed": f"{replays['rounds']:,}, each with other trees, slots, live nodes",
        "rows": f"{rows['all']:,}, {rows.get('padded', 0):,} of them padded",
        "nodes": f"{rows['nodes']:,}, {rows['dead nodes']:,} of them dead and filled with NaN",
        "bit-equal to eager": f"{replays['bit-equal to eager']:,} of {replays['rounds']:,} rounds",
        "errors over their limits, float64 oracle": errors(replays),
        "allocations, compilations, waits": f"{replays['allocations']}, "
        f"{replays['compilations']}, 0",
        "launches of a round": f"{sum(launches.values())}: "
        + ", ".join(f"{name} {count}" for name, count in sorted(launches.items())),
        "rounds with random rejects": f"{rejects['rounds']:,} of `{rejects['module']}`, "
        f"{rejects['tokens accepted']:,} tokens accepted",
        "errors over their limits, serial recurrence": errors(rejects),
    }
    run_on = f"torch {device['torch']}, Triton {device['triton']}, Python {device['python']}"
    return f"""# Rounds on a GPU

Written by `python benchmarks/rounds.py` on {device["device"]}, {run_on}.
An error over its limit passes at 1 or less; the limits are those of [theory.md](theory.md), and \
for many rounds 1.5 times what float32 itself errs.

{table(["what", "found"], [[name, said] for name, said in found.items()])}"""


if __name__ == "__main__":
    main()

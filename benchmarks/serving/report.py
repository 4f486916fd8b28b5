"""Latencies under load, once answers were checked: python -m benchmarks.serving.report AR.json ...

Plain decoding first. Exits with 1 where a system's answers do not hold, whose speed is then not
printed, or a result is missing.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.records import name, read_records, write_lines
from benchmarks.pages import table
from benchmarks.serving.check import check_records, find_faults

__all__ = [
    "FIGURES", "LOADS", "MEMORY", "figures", "list_loads", "list_memory", "loads_of", "main",
    "percentile",
]  # fmt: skip

Record = dict[str, Any]
# figure, its heading, digits
FIGURES: tuple[tuple[str, str, int], ...] = (
    ("ttft_mean", "TTFT, ms: mean", 0), ("ttft_p50", "p50", 0), ("ttft_p99", "p99", 0),
    ("tpot_mean", "TPOT, ms: mean", 2), ("tpot_p50", "p50", 2), ("tpot_p99", "p99", 2),
    ("latency_p50", "latency, s: p50", 2), ("tokens_per_s", "tokens/s", 0),
    ("hit_rate", "prompt found cached, %", 1), ("retracted", "requests retracted", 0),
    ("late_p99", "sent late, ms: p99", 1),
)  # fmt: skip
LOADS = ["system", "load", "answers alike", *(heading for _, heading, _ in FIGURES)]
MEMORY = ["system", "requests at once", "KV tokens", "KV, GiB", "slots of states", "states, GiB",
          "of a round, GiB"]  # fmt: skip
# what SGLang calls GB is 2^30 bytes
SIZE = r"{} ?(?:size: |=)?([0-9.]+) ?GB"
STATES = ("conv_state", "ssm_state")
ROUND = ("intermediate_ssm_state_cache", "intermediate_conv_window_cache", *"dkg", "rawv", "rawk")


def percentile(values: list[float], percent: int) -> float:
    """Between the two nearest of the sorted values, linearly."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def figures(run: Record) -> dict[str, float]:
    """All figures of one load. TTFT is counted from when a request was due; TPOT is the time from
    the first token to the last over the tokens after the first, however many come at once.
    """
    rows = [dict(zip(run["columns"], row, strict=True)) for row in run["rows"]]
    tokens = run["tokens"]
    ttft = [1e3 * (row["first"] - row["due"]) for row in rows]
    tpot = [
        1e3 * (row["end"] - row["first"]) / (count - 1)
        for row, count in zip(rows, tokens, strict=True)
        if count > 1
    ]
    late = [1e3 * (row["sent"] - row["due"]) for row in rows]
    spent = max(row["end"] for row in rows) - min(row["due"] for row in rows)
    cached, prompt = (sum(row[k] for row in rows) for k in ("cached_tokens", "prompt_tokens"))
    found = {
        "latency_p50": percentile([row["end"] - row["due"] for row in rows], 50),
        "tokens_per_s": sum(tokens) / spent,
        "hit_rate": 100 * cached / prompt,
        "retracted": float(sum(row["retractions"] > 0 for row in rows)),
        "late_p99": percentile(late, 99),
    }
    for what, values in (("ttft", ttft), ("tpot", tpot)):
        found[f"{what}_mean"] = statistics.fmean(values)
        found |= {f"{what}_p{p}": percentile(values, p) for p in (50, 99)}
    return found


def loads_of(record: Record) -> dict[float, list[Record]]:
    """Runs by load; the runs of one load differ in their seed."""
    loads: dict[float, list[Record]] = {}
    for run in record["runs"]:
        loads.setdefault(run["load"], []).append(run)
    return loads


def list_loads(records: list[Record]) -> list[list[str]]:
    """Rows under LOADS, a load's systems together; no speed where answers do not hold."""
    rows = []
    for load in loads_of(records[0]):
        for record in records:
            runs = loads_of(record)[load]
            rows.append([name(record), f"{load:g}", _answers(record, runs)])
            found = [figures(run) for run in runs]
            holds = not find_faults(record)
            rows[-1] += [
                _spell([f[key] for f in found], digits) if holds else "-"
                for key, _, digits in FIGURES
            ]
    return rows


def _answers(record: Record, runs: list[Record]) -> str:
    if record["accept"] is not None:
        return "simulated" if record["vouched"] else "simulated, not checked"
    alike, compared, asked = (
        sum(run["answers"][key] for run in runs) for key in ("alike", "compared", "asked")
    )
    said = f"{alike} of {compared}, {asked} asked"
    return f"{said}: do not hold" if find_faults(record) else said


def _spell(values: list[float], digits: int) -> str:
    """A figure; the median over seeds with the least and most."""
    say: Callable[[float], str] = f"{{:.{digits}f}}".format
    middle = say(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({say(min(values))}-{say(max(values))})"


def list_memory(records: list[Record]) -> list[list[str]]:
    """Rows under MEMORY, by the engine's own log: snapshots, rings or factors are of a round."""
    rows = []
    for record in records:
        said = "; ".join(record["memory_lines"])
        slots = re.search(r"max_mamba_cache_size: (\d+)", said)
        ours = re.findall(r"layers: ([0-9.]+) GB for", said)
        kept = _sizes(said, ROUND) + sum(map(float, ours))
        rows.append([
            name(record), str(record["running"]), str(record["memory"]["token_capacity"]),
            f"{record['memory']['kvcache']:.2f}", slots[1] if slots else "-",
            f"{_sizes(said, STATES):.2f}", f"{kept:.2f}" if record["tree"] else "-",
        ])  # fmt: skip
    return rows


def _sizes(said: str, names: tuple[str, ...]) -> float:
    """The sum of what the log says of each name, once."""
    found = [re.search(r"\b" + SIZE.format(each), said) for each in names]
    return sum(float(match[1]) for match in found if match)


def main(arguments: list[str] | None = None) -> None:
    """Check, print, keep; exit 1 for a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="plain decoding first")
    parser.add_argument("--keep", nargs=2, help="FOLDER WHAT: write FOLDER/RELEASE-WHAT.jsonl")
    parser.add_argument(
        "--vouchers", type=Path, help="checked records that vouch for simulated ones"
    )
    options = parser.parse_args(arguments)
    held, missing = read_records(options.files)
    vouchers, unread = read_records([options.vouchers] if options.vouchers else [])
    missing += unread
    if not held:
        sys.exit(f"bolegen: no result: {', '.join(missing)}")
    records = check_records(held, vouchers)
    print(json.dumps(records[0]["versions"] | records[0]["settings"]))
    print(table(LOADS, list_loads(records)), end="")
    print(table(MEMORY, list_memory(records)), end="")
    faults = [fault for record in records for fault in find_faults(record)]
    faults += [f"no result: {what}" for what in missing]
    print("\n".join(faults) or "no faults")
    if options.keep:
        folder, what = options.keep
        release = records[0]["versions"]["sglang"]
        write_lines(Path(folder) / f"{release}-{what}.jsonl", records)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

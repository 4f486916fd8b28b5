"""Rounds, verify forwards and commits of each tree, SGLang's own beside ours, as a table.

Exits with 1 where the plugin is slower anywhere, or a result is missing.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.records import read_records, spell_tree
from benchmarks.engine.report import count_rounds
from benchmarks.pages import table

__all__ = ["HEAD", "choose_tiers", "list_speeds", "main", "write_plain", "write_round"]

HEAD = [
    "tree", "batch", "ms a round: SGLang", "bolegen", "ratio", "verify, us: SGLang", "bolegen",
    "ratio", "commit, us: SGLang", "bolegen", "tokens/s: decoding", "SGLang", "bolegen",
]  # fmt: skip
Record = dict[str, Any]


def spell(values: list[float], digits: int) -> str:
    """A median and the range around it."""
    middle, low, high = (
        f"{v:.{digits}f}" for v in (statistics.median(values), values[0], values[-1])
    )
    return f"{middle} ({low}-{high})"


def list_speeds(records: list[Record]) -> tuple[list[list[str]], list[str]]:
    """Rows under HEAD, plain decoding first, and where the plugin is slower."""
    trees = {(r["tree"], r["plugin"]): r for r in records}
    rows, slower = [], []
    for (tree, plugin), ours in trees.items():
        stock = trees.get((tree, False))
        if plugin and not count_rounds(ours):
            slower.append(f"{tree}: the plugin committed no round")
        if plugin and stock is not None:
            found = compare_tree(records[0], stock, ours)
            rows += found[0]
            slower += found[1]
    return rows, slower


def compare_tree(plain: Record, stock: Record, ours: Record) -> tuple[list[list[str]], list[str]]:
    """The same of one tree."""
    rows, slower = [], []
    for base, own, run in zip(plain["runs"], stock["runs"], ours["runs"], strict=True):
        batch = str(run["batch"])
        rounds = own["round_ms"], run["round_ms"]
        verify, commit = (
            [r["probe"][what][batch]["device"] for r in (stock, ours)]
            for what in ("verify", "commit")
        )
        ratios = [statistics.median(a) / statistics.median(b) for a, b in (rounds, verify)]
        cells = [*(spell(ms, 2) for ms in rounds), f"{ratios[0]:.2f}"]
        cells += [*(spell(us, 0) for us in verify), f"{ratios[1]:.2f}"]
        cells += [spell(us, 0) for us in commit]
        cells += [f"{r['tokens_per_s']:.0f}" for r in (base, own, run)]
        rows.append([spell_tree(ours["tree"]), batch, *cells])
        if min(ratios) <= 1:
            slower.append(f"{ours['tree']}, batch {batch}: {ratios[0]:.2f}, {ratios[1]:.2f}")
    return rows, slower


def choose_tiers(records: list[Record]) -> str:
    """BOLEGEN_TIERS: for each batch size the tree, or plain decoding, of most tokens a second.

    A server has one topk: the commonest of the records.
    """
    trees = [(*r["tree"].split(","), r["runs"]) for r in records if r["plugin"]]
    topk = statistics.mode(topk for _, topk, _, _ in trees)
    tiers: list[str] = []
    for i, run in enumerate(records[0]["runs"]):
        speeds = {"0": run["tokens_per_s"]} | {
            f"{steps}x{nodes}": runs[i]["tokens_per_s"]
            for steps, own, nodes, runs in trees
            if own == topk
        }
        best = max(speeds, key=speeds.__getitem__)
        if not tiers or not tiers[-1].endswith(f":{best}"):
            tiers.append(f"{run['batch']}:{best}")
    return " ".join(tiers)


def write_round(record: Record) -> str:
    """A round's memory beside snapshots, and the path that a commit replays, of the plugin."""
    said = record["bolegen"]
    paths = said["bolegen_accepted_length_nodes"]
    smaller = said["snapshot_bytes"] / said["round_bytes"]
    return (
        f"{spell_tree(record['tree'])}: a round's memory {smaller:.0f} times smaller, "
        f"{paths['sum'] / paths['count']:.2f} nodes committed by a request"
    )


def write_plain(record: Record) -> str:
    """A line of an engine without trees."""
    runs = (
        f"batch {r['batch']}: {spell(r['round_ms'], 2)} ms, {r['tokens_per_s']:.0f} tokens/s"
        for r in record["runs"]
    )
    return f"{record['label']}: {'; '.join(runs)}"


def main() -> None:
    """Print the table; exit 1 where it shows a loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="plain decoding first")
    files = parser.parse_args().files
    records, missing = read_records(files)
    print(json.dumps(records[0]["versions"]))
    rows, losses = list_speeds(records)
    print(table(HEAD, rows), end="")
    paired = {r["tree"] for r in records if r["plugin"]}
    for record in records:
        if record["tree"] not in paired:
            print(write_plain(record))
        hosts = {
            what: {batch: call["host"] for batch, call in calls.items()}
            for what, calls in record["probe"].items()
            if what != "round"  # the device's alone
        }
        print(f"{record['label']}: host, us: {hosts}; {record['memory']}")
    print(f"BOLEGEN_TIERS={choose_tiers(records)!r}")
    print(f"no result: {missing}" if missing else "every result is there")
    print("slower: " + "; ".join(losses) if losses else "faster at every point")
    sys.exit(1 if losses or missing else 0)


if __name__ == "__main__":
    main()

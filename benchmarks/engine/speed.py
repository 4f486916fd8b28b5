"""Rounds, verify forwards and commits of each tree, SGLang's own beside ours, as a table.

Exits with 1 where the plugin is slower anywhere, or a result is missing.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]

HEAD = (
    "| tree | batch | ms a round: SGLang | bolegen | ratio | verify, us: SGLang | bolegen | ratio "
    "| commit, us: SGLang | bolegen | tokens/s: decoding | SGLang | bolegen |\n"
    + "| --- " * 13
    + "|"
)
Record = dict[str, Any]


def spell(values: list[float], digits: int) -> str:
    """A median and the range around it."""
    middle, low, high = (
        f"{v:.{digits}f}" for v in (statistics.median(values), values[0], values[-1])
    )
    return f"{middle} ({low}-{high})"


def write_rows(plain: Record, stock: Record, ours: Record) -> tuple[list[str], list[str]]:
    """Lines of one tree, and where the plugin is slower."""
    lines, slower = [], []
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
        lines.append(f"| {ours['tree']} | {batch} | {' | '.join(cells)} |")
        if min(ratios) <= 1:
            slower.append(f"{ours['tree']}, batch {batch}: {ratios[0]:.2f}, {ratios[1]:.2f}")
    return lines, slower


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
    records = [json.loads(path.read_text("utf-8")) for path in files if path.exists()]
    missing = [path.name for path in files if not path.exists()]
    plain, trees = records[0], {(r["tree"], r["plugin"]): r for r in records}
    print(json.dumps(plain["versions"]))
    print(HEAD)
    losses = []
    for (tree, plugin), ours in trees.items():
        stock = trees.get((tree, False))
        if plugin and stock is not None:
            lines, slower = write_rows(plain, stock, ours)
            print("\n".join(lines))
            losses += slower
    for record in records:
        if (record["tree"], True) not in trees:
            print(write_plain(record))
        hosts = {k: {b: c["host"] for b, c in v.items()} for k, v in record["probe"].items()}
        print(f"{record['label']}: host, us: {hosts}; {record['memory']}")
    print(f"no result: {missing}" if missing else "every result is there")
    print("slower: " + "; ".join(losses) if losses else "faster at every point")
    sys.exit(1 if losses or missing else 0)


if __name__ == "__main__":
    main()

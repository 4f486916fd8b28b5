"""What each part of the plugin brings in tokens a second, cumulatively: ablation.py RECORDS.

SGLang's trees of one width, then of the best width for each batch; then bolegen's parallel
verifier with a state stored for every node; then with factors in their place.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.records import count_nodes, read_records
from benchmarks.engine.report import count_rounds
from benchmarks.pages import table

__all__ = ["main", "write_ablation"]

Record = dict[str, Any]
SYSTEMS = ("stock", "states", "ours")


def write_ablation(records: list[Record]) -> str:
    """A row a batch: tokens a second, (the width that is best), and times the first column; no
    step by width where there is one.
    """
    speeds = {}
    for record in records:
        system = record["label"].partition("-")[0]
        for run in record["runs"]:
            at = run["batch"]
            speeds[system, count_nodes(record, at), at] = run["tokens_per_s"]
    widths = {nodes for system, nodes, _ in speeds if system == "stock"}
    fixed, systems = max(widths), SYSTEMS if len(widths) > 1 else SYSTEMS[1:]
    rows = []
    for batch in (run["batch"] for run in records[0]["runs"]):
        first = speeds["stock", fixed, batch]
        cells = [str(batch), f"{speeds['ar', 1, batch]:.0f}", f"{first:.0f}"]
        for system in systems:
            own = {n: speed for (s, n, b), speed in speeds.items() if (s, b) == (system, batch)}
            nodes = max(own, key=own.__getitem__)
            cells.append(f"{own[nodes]:.0f} ({nodes}), {own[nodes] / first:.2f}x")
        rows.append(cells)
    steps = ["+ a width by batch", "+ parallel verifier, states stored", "+ factors"]
    head = ["batch", "plain decoding", f"SGLang's trees of {fixed}", *steps[-len(systems) :]]
    return table(head, rows)


def main() -> None:
    """Print the table; exit 1 where a result is missing or the plugin committed nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="plain decoding first")
    records, missing = read_records(parser.parse_args().files)
    if missing:
        sys.exit(f"no result: {missing}")
    idle = [record["label"] for record in records if record["plugin"] and not count_rounds(record)]
    print(json.dumps(records[0]["versions"]))
    print(write_ablation(records), end="")
    for record in records:
        print(
            f"{record['label']}: {record['probe'].get('verify')}, {record['probe'].get('commit')}"
        )
    sys.exit(f"the plugin committed no round: {idle}" if idle else 0)


if __name__ == "__main__":
    main()

"""Beside the first file, plain decoding: equal tokens, ties, accepted lengths, times, memory.

Exits with 1 where the plugin's tokens leave plain decoding's at a clear lead while SGLang's own
trees do not, or where its accepted lengths are not those of SGLang's own trees.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]

TIE = 0.25  # log-probabilities of bf16 logits lie on steps of up to this
# ties change what is accepted: lengths may be off by this part of the engine's own
LENGTHS = 0.1


def first_differences(base: dict[str, Any], run: dict[str, Any]) -> list[tuple[int, float]]:
    """Where requests leave the base's tokens, and the lead of the base's token there."""
    kept = next(r for r in base["runs"] if r["batch"] == run["batch"])
    margins = base.get("margins") or []
    found = []
    for i, (want, got) in enumerate(zip(kept["output_ids"], run["output_ids"], strict=True)):
        at = next(
            (j for j, pair in enumerate(zip(want, got, strict=True)) if len({*pair}) > 1), None
        )
        if at is None:
            continue
        lead = float("nan")
        if i < len(margins) and margins[i]["output_ids"][: at + 1] == want[: at + 1]:
            lead = margins[i]["lead"][at]
        found.append((at, lead))
    return found


def write_row(base: dict[str, Any], record: dict[str, Any], run: dict[str, Any]) -> str:
    """One line of the table."""
    differing = first_differences(base, run)
    said = " ".join(f"{at}:{lead:.3g}" for at, lead in differing)
    accepted = "-" if run["accepted"] is None else f"{run['accepted']:.2f}"
    low, high = run["round_ms"][0], run["round_ms"][-1]
    count = len(run["output_ids"])
    return (
        f"| {record['label']} | {run['batch']} | {count - len(differing)}/{count} | {said or '-'} "
        f"| {accepted} | {max(run['rounds'])} | {low:.2f}-{high:.2f} | {run['tokens_per_s']:.0f} |"
    )


def find_faults(base: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """What the plugin may not do, beside SGLang's own trees of the same shape."""
    own = {r["tree"]: r for r in records if not r["plugin"] and r["tree"]}
    faults = []
    for record in (r for r in records if r["plugin"]):
        stock = own.get(record["tree"])
        for i, run in enumerate(record["runs"]):
            # a lead that plain decoding did not record is no tie
            clear = [d for d in first_differences(base, run) if not d[1] <= TIE]
            if clear:
                faults.append(
                    f"{record['label']}, batch {run['batch']}: leads lost, clear or unknown: "
                    f"{clear}"
                )
            if stock is None:
                continue
            want = stock["runs"][i]["accepted"]
            if abs(run["accepted"] - want) > LENGTHS * want:
                faults.append(
                    f"{record['label']}, batch {run['batch']}: accepted length "
                    f"{run['accepted']:.2f}, SGLang's own {want:.2f}"
                )
    return faults


def main() -> None:
    """Print the tables; exit 1 for a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="plain decoding first")
    parser.add_argument("--times-only", action="store_true", help="random weights: no faults")
    options = parser.parse_args()
    records = [json.loads(path.read_text("utf-8")) for path in options.files if path.exists()]
    missing = [str(path) for path in options.files if not path.exists()]
    if missing:
        print(f"no result: {', '.join(missing)}")
    if not records or records[0]["tree"]:
        sys.exit("bolegen: plain decoding has no result; see its log")
    print(json.dumps(records[0]["versions"]))
    print(
        "| engine | batch | equal to decoding | first other token: lead | accepted | rounds ",
        end="",
    )
    print("| ms a round | tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for record in records:
        for run in record["runs"]:
            print(write_row(records[0], record, run))
    for record in records:
        print(f"{record['label']}: {record['memory']} {record['bolegen'] or ''}")
    faults = [] if options.times_only else find_faults(records[0], records)
    print("\n".join(faults) or "no faults")
    sys.exit(1 if faults or missing else 0)


if __name__ == "__main__":
    main()

"""Decoding by batch and context, checked: python -m benchmarks.serving.offline AR.json ...

Plain decoding first. A system whose accepted lengths are not those that were to be simulated, or
that committed no round of ours, has no speed. Exits with 1 for that, for a result that is
missing, and where ours are not faster than SGLang's.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.records import find_length, find_tree, read_records, spell_tree
from benchmarks.engine.report import LENGTHS, count_rounds
from benchmarks.pages import table
from benchmarks.serving.shares import SHARES, list_shares

__all__ = [
    "GRID", "MEANS", "PLAIN", "SPEEDS", "check_offline", "find_faults", "list_gains",
    "list_left_out", "list_pairs", "list_plain", "list_speeds", "list_waits", "main", "speeds_of",
]  # fmt: skip

SPEEDS = [
    "tree", "context", "batch", "tokens/s: plain decoding", "SGLang's chain", "SGLang's",
    "bolegen", "over SGLang's", "over decoding", "over the best of SGLang's",
    "round, ms: SGLang's", "bolegen", "target pass, us: SGLang's", "bolegen",
]  # fmt: skip
MEANS = ["layers", "tree", "points", "over SGLang's", "over plain decoding",
         "over the best of SGLang's", "slower than the best at (context x batch)"]  # fmt: skip
PLAIN = ["context", "batch", "tokens/s: SGLang without drafts", "bolegen, plain decoding", "ratio"]
GRID = [(context, batch) for context in (1024, 8192, 32768) for batch in (1, 2, 4, 8, 16)]
Point = tuple[int, int]
Record = dict[str, Any]


def check_offline(records: list[Record]) -> None:
    """ValueError unless plain decoding comes first and all measured the same points."""
    base = records[0]
    if base["tree"]:
        raise ValueError(f"plain decoding must come first, got {base['label']}")
    points = [_point(run) for run in base["runs"]]
    for record in records[1:]:
        for what in ("versions", "model"):
            if record[what] != base[what]:
                raise ValueError(
                    f"{record['label']}: {what} {record[what]}, plain decoding's {base[what]}"
                )
        if [_point(run) for run in record["runs"]] != points:
            raise ValueError(f"{record['label']}: its points are not plain decoding's")


def _point(run: Record) -> Point:
    return run["context"], run["batch"]


def find_faults(record: Record) -> list[str]:
    """Why a system's speed may not be printed."""
    faults = []
    if record["plugin"] and not count_rounds(record):
        faults.append(f"{record['label']}: the plugin committed no round")
    for run in record["runs"] if record["tree"] else []:
        want = find_length(record, run["batch"])
        if want is None or abs(run["accepted"] - want) > LENGTHS * want:
            faults.append(
                f"{record['label']}, {run['context']} x {run['batch']}: accepted length "
                f"{run['accepted']:.2f}, to be simulated {want}"
            )
    return faults


def speeds_of(records: list[Record]) -> dict[str, dict[Point, float]]:
    """Tokens a second by system and point, of systems without a fault."""
    return {
        record["label"]: {_point(run): run["tokens_per_s"] for run in record["runs"]}
        for record in records
        if not find_faults(record)
    }


def list_pairs(records: list[Record]) -> list[tuple[Record, Record]]:
    """SGLang's trees or chain and ours, of the same shape and both without a fault; ours by batch
    size are beside SGLang's first trees, or its chain.
    """
    own = {r["tree"]: r for r in records if r["tree"] and not r["plugin"]}
    first = [r for r in own.values() if r["label"].startswith("stock-")] or list(own.values())
    pairs = []
    for ours in (r for r in records if r["plugin"] and not r["label"].startswith("plain-")):
        stock = next(iter(first), None) if ours.get("tiers") else own.get(ours["tree"])
        if stock and not find_faults(stock) and not find_faults(ours):
            pairs.append((stock, ours))
    return pairs


def list_plain(records: list[Record]) -> list[list[str]]:
    """Rows under PLAIN: points at which ours decodes plainly, beside an engine without drafts."""
    speeds = speeds_of(records)
    rows = []
    for record in (r for r in records if r["plugin"]):
        for at, speed in speeds.get(record["label"], {}).items():
            if find_tree(record, at[1]) is None:
                base = speeds["ar"][at]
                rows.append([*map(str, at), f"{base:.0f}", f"{speed:.0f}", f"{speed / base:.3f}"])
    return rows


def list_speeds(records: list[Record]) -> list[list[str]]:
    """Rows under SPEEDS."""
    speeds = speeds_of(records)
    chains = [label for label in speeds if label.startswith("chain-")]
    rows = []
    for stock, ours in list_pairs(records):
        for theirs, run in zip(stock["runs"], ours["runs"], strict=True):
            at = _point(run)
            ratios = _ratios(records, (stock, ours), at)
            chain = max((speeds[label][at] for label in chains), default=None)
            shown = [speeds["ar"][at], chain, theirs["tokens_per_s"], run["tokens_per_s"]]
            cells = ["-" if v is None else f"{v:.0f}" for v in shown]
            cells += [f"{ratio:.2f}" for ratio in ratios]
            cells += [_spell(r, "round", 1e-3, 2) for r in (theirs, run)]
            cells += [_spell(r, "verify", 1, 0) for r in (theirs, run)]
            rows.append([_spell_tree(ours, at[1]), *map(str, at), *cells])
    return rows


def _ratios(
    records: list[Record], pair: tuple[Record, Record], at: Point
) -> tuple[float, float, float]:
    """How many times as fast as SGLang's, as plain decoding, as the best without us."""
    speeds, (stock, ours) = speeds_of(records), pair
    mine, plugins = speeds[ours["label"]][at], {r["label"] for r in records if r["plugin"]}
    best = max(found[at] for label, found in speeds.items() if label not in plugins)
    return mine / speeds[stock["label"]][at], mine / speeds["ar"][at], mine / best


def _spell_tree(ours: Record, batch: int) -> str:
    """The tree of a batch, and whether the engine chose it by batch size."""
    tree = find_tree(ours, batch)
    said = spell_tree(tree) if tree else "none"
    return f"{said}, by batch" if ours.get("tiers") else said


def _spell(run: Record, what: str, scale: float, digits: int) -> str:
    """The median with the quartiles, of rounds or passes; - where too few were seen."""
    call = run["probe"].get(what, {}).get(str(run["batch"]))
    if call is None:
        return "-"
    low, middle, high = (f"{scale * v:.{digits}f}" for v in call["device"])
    return f"{middle} ({low}-{high})"


def list_gains(records: list[Record]) -> list[list[str]]:
    """Rows under MEANS: geometric means with the least and most of all points."""
    rows = []
    for stock, ours in list_pairs(records):
        points = [_point(run) for run in ours["runs"]]
        ratios = [_ratios(records, (stock, ours), at) for at in points]
        lost = [f"{c} x {b}" for (c, b), found in zip(points, ratios, strict=True) if found[2] < 1]
        cells = [
            f"{statistics.geometric_mean(found):.2f} ({min(found):.2f}-{max(found):.2f})"
            for found in zip(*ratios, strict=True)
        ]
        tree = f"by batch: {ours['tiers']}" if ours.get("tiers") else spell_tree(ours["tree"])
        layers = str(ours["model"]["layers"])
        rows.append([layers, tree, str(len(points)), *cells, ", ".join(lost) or "-"])
    return rows


def list_left_out(records: list[Record]) -> str:
    """Points of GRID that were not measured, and what they would take."""
    measured = {_point(run) for run in records[0]["runs"]}
    size = records[0]["model"]["kv_bytes"]
    said = [
        f"{context} x {batch} ({context * batch / 1024:.0f}k tokens to read, "
        f"{context * batch * size / 2**30:.1f} GiB of KV an engine)"
        for context, batch in GRID
        if (context, batch) not in measured
    ]
    return f"Not measured, for time or memory: {', '.join(said) or 'nothing'}."


def list_waits(records: list[Record]) -> list[str]:
    """The time that an answer took over its rounds' on the device: least and most of a system's
    points. Well above 1 an engine compiled or waited meanwhile, and the run is to be repeated.
    """
    said = []
    for record in records:
        found = []
        for run in record["runs"]:
            call = run["probe"].get("round", {}).get(str(run["batch"]))
            if call:
                found.append(1e6 * run["seconds"] / (run["rounds"] * call["device"][1]))
        said += [f"{record['label']}: {min(found):.2f} to {max(found):.2f}"] if found else []
    return said


def main(arguments: list[str] | None = None) -> None:
    """Print what the page will say; exit 1 for a fault or a loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="plain decoding first")
    records, missing = read_records(parser.parse_args(arguments).files)
    if not records:
        sys.exit(f"bolegen: no result: {', '.join(missing)}")
    check_offline(records)
    print(json.dumps(records[0]["versions"] | records[0]["model"]))
    print(table(SPEEDS, list_speeds(records)), end="")
    print(table(MEANS, list_gains(records)), end="")
    print(table(SHARES, list_shares(records)), end="")
    print(table(PLAIN, list_plain(records)), end="")
    print(list_left_out(records))
    print(f"wall clock over rounds: {'; '.join(list_waits(records))}")
    faults = [fault for record in records for fault in find_faults(record)]
    faults += [f"{r['label']}: no share: {r['no_passes']}" for r in records if "no_passes" in r]
    faults += [f"no result: {what}" for what in missing]
    for pair in list_pairs(records):
        points = [_point(run) for run in pair[1]["runs"]]
        slower = [at for at in points if _ratios(records, pair, at)[0] <= 1]
        if slower:
            faults.append(f"{pair[1]['label']}: not faster than {pair[0]['label']} at {slower}")
    print("\n".join(faults) or "no faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

"""Beside the first file, plain decoding: equal tokens, ties, accepted lengths, laws, cache hits.

Exits with 1 where the plugin's tokens leave plain decoding's at a clear lead, its accepted lengths
or its cache's hits are not those of SGLang's own trees, or its samples follow another law.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.answers import find_parting, is_tie
from benchmarks.engine.records import read_records
from benchmarks.pages import table

__all__ = ["TOKENS", "count_rounds", "find_cached", "list_tokens", "main", "sample_chances"]

# ties change what is accepted: lengths may be off by this part of the engine's own
LENGTHS = 0.1
FEW = 5  # samples that a token needs to be counted by itself
UNLIKELY = 1e-4
TOKENS = ["engine", "batch", "equal to decoding", "first other token: lead", "accepted", "rounds"]


def first_differences(base: dict[str, Any], run: dict[str, Any]) -> list[tuple[int, float]]:
    """Where requests leave the base's tokens, and the lead of the base's token there."""
    kept = next(r for r in base["runs"] if r["batch"] == run["batch"])
    leads = kept.get("leads") or [[]] * len(kept["output_ids"])
    answers = zip(kept["output_ids"], run["output_ids"], leads, strict=True)
    # records keep an answer up to its first other token
    partings = [find_parting(want[: len(got)], got, lead) for want, got, lead in answers]
    return [parting for parting in partings if parting is not None]


def list_tokens(records: list[dict[str, Any]]) -> list[list[str]]:
    """Rows under TOKENS, plain decoding first."""
    rows = []
    for record in records:
        for run in record["runs"]:
            differing = first_differences(records[0], run)
            said = " ".join(f"{at}:{lead:.3g}" for at, lead in differing)
            accepted = "-" if run["accepted"] is None else f"{run['accepted']:.2f}"
            count = len(run["output_ids"])
            equal = f"{count - len(differing)}/{count}"
            rounds = str(max(run["rounds"]))
            rows.append([record["label"], str(run["batch"]), equal, said or "-", accepted, rounds])
    return rows


def count_rounds(record: dict[str, Any]) -> int:
    """Rounds that the plugin committed, by its own counters in the server's state."""
    said = record["bolegen"] or {}
    widths = [said, *said.get("narrower", [])]
    return sum(int(width.get("bolegen_rounds_total", 0)) for width in widths)


def find_faults(base: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """What the plugin may not do, beside SGLang's own trees of the same shape."""
    own = {r["tree"]: r for r in records if not r["plugin"] and r["tree"]}
    faults = []
    for record in (r for r in records if r["plugin"]):
        if not count_rounds(record):
            faults.append(f"{record['label']}: the plugin committed no round")
        stock = own.get(record["tree"])
        for i, run in enumerate(record["runs"]):
            clear = [d for d in first_differences(base, run) if not is_tie(d[1])]
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


def compare_counts(one: dict[str, int], other: dict[str, int]) -> float:
    """Chance of a chi-square as large if both were drawn by one law; rare tokens count as one."""
    common = [t for t in one | other if one.get(t, 0) + other.get(t, 0) >= 2 * FEW]
    table = torch.tensor([[drawn.get(t, 0) for t in common] for drawn in (one, other)]).double()
    rest = torch.tensor([sum(one.values()), sum(other.values())]).double() - table.sum(1)
    if rest.sum() >= 2 * FEW:
        table = torch.cat([table, rest[:, None]], 1)
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    square = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor(table.shape[1] - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, square / 2)) if freedom else 1.0


def sample_chances(base: dict[str, Any], record: dict[str, Any]) -> list[float]:
    """That chance for each prompt and position, plain decoding against an engine."""
    return [
        compare_counts(want[at], got[at])
        for want, got in zip(base["samples"], record["samples"], strict=True)
        for at in want
    ]


def report_samples(base: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """Print the chances; the faults of the plugin."""
    faults = []
    for record in (r for r in records if r.get("samples") and r is not base):
        chances = sample_chances(base, record)
        drawn = sum(record["samples"][0]["1"].values())
        print(
            f"{record['label']}: {len(chances)} laws of {drawn} samples each beside plain "
            f"decoding's, chances {' '.join(f'{p:.2g}' for p in chances)}"
        )
        if record["plugin"] and min(chances) < UNLIKELY:
            faults.append(f"{record['label']}: sampled by another law, chance {min(chances):.1g}")
    return faults


def find_cached(records: list[dict[str, Any]]) -> tuple[list[int], list[list[int]]]:
    """Conversations that all engines answered alike; of those, for each engine, the tokens that a
    turn found in the cache.
    """
    base = [talk["output_ids"] for talk in records[0]["talks"]]
    alike = [
        i
        for i, want in enumerate(base)
        if all(r["talks"][i]["output_ids"] == want for r in records)
    ]
    turns = range(len(records[0]["talks"][0]["cached"]))
    return alike, [
        [sum(record["talks"][i]["cached"][turn] for i in alike) for turn in turns]
        for record in records
    ]


def part_of_talks(base: dict[str, Any], record: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Turn and position where each conversation that is not the base's leaves it, and the lead of
    the base's token there, nan where it was not recorded.
    """
    found = []
    for want, got in zip(base["talks"], record["talks"], strict=True):
        leads = want.get("leads") or [[]] * len(want["output_ids"])
        turns = zip(want["output_ids"], got["output_ids"], leads, strict=True)
        partings = enumerate(find_parting(*turn) for turn in turns)
        found += [(turn, *parting) for turn, parting in partings if parting is not None][:1]
    return found


def report_talks(records: list[dict[str, Any]]) -> list[str]:
    """Print what conversations found in the cache and where they part; the plugin's faults: less
    found than by SGLang's own trees, over those that all engines answered alike, or a clear lead
    lost.
    """
    alike, cached = find_cached(records)
    faults = []
    for record, turns in zip(records, cached, strict=True):
        parts = part_of_talks(records[0], record)
        said = " ".join(f"{i}:{at}:{lead:.3g}" for i, at, lead in parts)
        print(
            f"{record['label']}: tokens found cached by turn {turns}, over the {len(alike)} of "
            f"{len(record['talks'])} conversations that all engines answered alike; the others' "
            f"turn:token:lead {said or '-'}"
        )
        clear = [part for part in parts if not is_tie(part[2])]
        if record["plugin"] and clear:
            faults.append(f"{record['label']}: leads lost, clear or unknown: {clear}")
    if not alike:
        return [*faults, "no conversation is equal in all engines"]
    _, own, ours = (sum(turns) for turns in cached)
    if ours < own:
        faults.append(f"cached tokens: {ours} with the plugin, {own} without")
    return faults if count_rounds(records[2]) else [*faults, "the plugin committed no round"]


def main() -> None:
    """Print the tables; exit 1 for a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="plain decoding first")
    options = parser.parse_args()
    records, missing = read_records(options.files)
    if missing:
        print(f"no result: {', '.join(missing)}")
    if not records or records[0]["tree"]:
        sys.exit("bolegen: plain decoding has no result; see its log")
    print(json.dumps(records[0]["versions"]))
    faults = report_talks(records) if "talks" in records[0] else report_tokens(records)
    print("\n".join(faults) or "no faults")
    sys.exit(1 if faults or missing else 0)


def report_tokens(records: list[dict[str, Any]]) -> list[str]:
    """Print tokens, laws and memory; the faults of the plugin."""
    base = records[0]
    print(table(TOKENS, list_tokens(records)), end="")
    for record in records:
        print(f"{record['label']}: {record['memory']}")
    return find_faults(base, records) + report_samples(base, records)


if __name__ == "__main__":
    main()

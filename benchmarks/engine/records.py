"""Results of one run of the engine in one file: python records.py FOLDER WHAT RESULT.json ...

writes FOLDER/RELEASE-WHAT.jsonl, plain decoding first. Of an answer that another engine gave to
the same prompt it keeps what tells them apart: the tokens up to the first other one, none where
all are equal.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.engine.answers import find_parting
from bolegen_runtime.sglang.tiers import parse_tiers

__all__ = [
    "count_nodes", "find_length", "find_tree", "name", "read_records", "shorten", "spell_tree",
    "write_lines", "write_records",
]  # fmt: skip

Record = dict[str, Any]
NAMES = {
    "ar": "plain decoding",
    "chain": "SGLang's chain",
    "replayssm": "SGLang's chain, ReplaySSM",
    "stock": "SGLang's trees",
    "ours": "bolegen",
    "states": "bolegen, a state stored for every node",
    "tiers": "bolegen, trees by batch size",
    "plain": "bolegen, plain decoding from two requests",
}


def find_tree(record: Record, batch: int) -> str | None:
    """steps,topk,nodes that an engine drafts for a batch, by its tiers if it has some; None where
    it drafts nothing.
    """
    tree: str | None = record["tree"]
    if not tree or not record.get("tiers"):
        return tree
    tier = [tier for tier in parse_tiers(record["tiers"]) if tier.batch <= batch][-1]
    return f"{tier.steps},{tree.split(',')[1]},{tier.nodes}" if tier.steps else None


def count_nodes(record: Record, batch: int) -> int:
    """Nodes of a request that a target pass of a batch holds: 1 without drafts."""
    tree = find_tree(record, batch)
    return int(tree.rpartition(",")[2]) if tree else 1


def find_length(record: Record, batch: int) -> float | None:
    """The accepted length that was to be simulated for a batch."""
    tree, said = find_tree(record, batch), record["accept"]
    if isinstance(said, dict):
        return said.get(tree.partition(",")[0]) if tree else 1.0
    length: float | None = said
    return length


def name(record: Record) -> str:
    """A system by its label, KIND or KIND-TREE, and steps x topk x nodes of what it drafts."""
    kind, _, tree = record["label"].partition("-")
    if kind == "stock" and "," in tree and tree.split(",")[1] == "1":
        kind = "chain"
    return f"{NAMES[kind]}, {spell_tree(tree)}" if tree else NAMES[kind]


def spell_tree(tree: str) -> str:
    """steps x topk x nodes, as people write it."""
    return tree.replace(",", "x")


def read_records(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Records of .json and .jsonl files in order, and the names of files that are not there."""
    records: list[Record] = []
    missing = []
    for path in paths:
        if path.exists():
            records += map(json.loads, path.read_text("utf-8").splitlines())
        else:
            missing.append(path.name)
    return records, missing


def write_records(path: Path, records: list[Record]) -> None:
    """One line a record, answers shortened."""
    write_lines(path, [records[0], *(shorten(records[0], record) for record in records[1:])])


def write_lines(path: Path, records: list[Record]) -> None:
    """One line a record."""
    lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    path.write_text("".join(lines), "utf-8")


def shorten(base: Record, record: Record) -> Record:
    """The record with each greedy answer up to the first token that is not the base's."""
    if "output_ids" not in record.get("runs", [{}])[0]:
        return record
    held = {run["batch"]: run["output_ids"] for run in base["runs"]}
    runs = [
        run
        | {
            "output_ids": [
                _until_other(want, got)
                for want, got in zip(held[run["batch"]], run["output_ids"], strict=True)
            ]
        }
        for run in record["runs"]
    ]
    return record | {"runs": runs}


def _until_other(want: list[int], got: list[int]) -> list[int]:
    parting = find_parting(want, got)
    return got[: parting[0] + 1] if parting else []


def main() -> None:
    """Gather what is there."""
    folder, what, *files = sys.argv[1:]
    records, missing = read_records(map(Path, files))
    if missing:
        sys.exit(f"bolegen: nothing is kept: no result of {', '.join(missing)}")
    if records[0]["plugin"] or (records[0].get("tree") and what not in ("capacity", "kit")):
        sys.exit(f"bolegen: {what}: expected plain decoding first, got {records[0]['label']}")
    release = records[0]["versions"]["sglang"]
    write_records(Path(folder) / f"{release}-{what}.jsonl", records)


if __name__ == "__main__":
    main()

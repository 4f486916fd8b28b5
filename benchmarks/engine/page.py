"""Fill docs/engine.md from docs/engine: python -m benchmarks.engine.page [--check]."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.ablation import write_ablation
from benchmarks.engine.records import name, read_records
from benchmarks.engine.report import find_cached, list_tokens, sample_chances
from benchmarks.engine.speed import HEAD, choose_tiers, list_speeds, write_plain, write_round
from benchmarks.engine.widths import write_nodes, write_steps
from benchmarks.pages import fill, table, update

__all__ = ["main", "write_page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE, FOLDER = ROOT / "docs" / "engine.md", ROOT / "docs" / "engine"
Records = list[dict[str, Any]]


def write_tokens(runs: dict[str, Records]) -> str:
    """Greedy tokens of every release: a line an engine, its batch sizes side by side."""
    rows = []
    for release, records in runs.items():
        for record in records[1:]:
            found = [row for row in list_tokens([records[0], record]) if row[0] == record["label"]]
            equal, leads, accepted = (" / ".join(row[i] for row in found) for i in (2, 3, 4))
            rows.append([release, name(record), equal, leads, accepted])
    head = ["SGLang", "engine", "equal to decoding", "first other token: lead", "accepted length"]
    return table(head, rows)


def write_laws(runs: dict[str, Records]) -> str:
    """The least chance of each engine's samples."""
    rows = []
    for release, records in runs.items():
        for record in records[1:]:
            if "samples" in record:
                chances = sample_chances(records[0], record)
                drawn = sum(record["samples"][0]["1"].values())
                rows.append(
                    [release, name(record), str(drawn), str(len(chances)), f"{min(chances):.2g}"]
                )
    return table(["SGLang", "engine", "samples", "laws compared", "least chance"], rows)


def write_talks(runs: dict[str, Records]) -> str:
    """Tokens that each turn found in the cache."""
    rows = []
    for release, records in runs.items():
        alike, cached = find_cached(records)
        for record, turns in zip(records, cached, strict=True):
            rows.append([release, name(record), str(len(alike)), " / ".join(map(str, turns))])
    return table(["SGLang", "engine", "conversations alike", "tokens found, by turn"], rows)


def write_speed(runs: dict[str, Records]) -> str:
    """Rounds, verify and commit of each tree; below them engines without trees, what rounds of
    the plugin took, and the tiers that follow.
    """
    said = ""
    for records in runs.values():
        paired = {record["tree"] for record in records if record["plugin"]}
        lines = [write_plain(r) for r in records if r["tree"] not in paired]
        lines += [write_round(r) for r in records if r["plugin"]]
        lines.append(f'most tokens a second: `BOLEGEN_TIERS="{choose_tiers(records)}"`')
        said += table(HEAD, list_speeds(records)[0]) + "\n"
        said += "".join(f"- {line}\n" for line in lines)
    return said


def write_widths(runs: dict[str, Records]) -> str:
    """What a width by batch and the plugin bring, then all widths, of the newest release."""
    records = next(iter(runs.values()))
    return f"{write_steps(records)}\n{write_nodes(records)}"


def write_steps_of(runs: dict[str, Records]) -> str:
    """The ablation of the newest release."""
    return write_ablation(next(iter(runs.values())))


def write_kit(runs: dict[str, Records]) -> str:
    """Largest errors of SGLang's kit by kind of case."""
    rows = []
    for release, records in runs.items():
        for record in records:
            for plan in ("kit", "tree"):
                cases = [case for case in record["cases"] if case["plan"] == plan]
                passed = sum(case["result"] == "passed" for case in cases)
                worst = max(case["error"] / case["largest"] for case in cases)
                verified = sum(case["verifies"] > 0 for case in cases)
                kind = {"kit": "as they are", "tree": "told of their trees"}[plan]
                rows.append([
                    release, kind, "bolegen" if record["plugin"] else "SGLang",
                    f"{passed} of {len(cases)}", str(verified), f"{worst:.1g}",
                ])  # fmt: skip
    head = ["SGLang", "cases", "engine", "passed", "verified by bolegen", "largest error"]
    return table(head, rows)


def write_capacity(runs: dict[str, Records]) -> str:
    """Tokens that fit into the KV cache."""
    rows = [
        [release, *(str(record["memory"]["token_capacity"]) for record in records)]
        for release, records in runs.items()
    ]
    return table(["SGLang", "KV tokens, SGLang's trees", "bolegen"], rows)


WRITERS: dict[str, tuple[str, Callable[[dict[str, Records]], str]]] = {
    "tokens": ("tokens", write_tokens),
    "laws": ("tokens", write_laws),
    "talks": ("talks", write_talks),
    "tiers": ("tiers", write_tokens),
    "tp": ("tp", write_tokens),
    "speed": ("speed", write_speed),
    "widths": ("speed", write_widths),
    "lengths": ("lengths", write_tokens),
    "ablation": ("ablation", write_steps_of),
    "ablation 40": ("ablation-40", write_steps_of),
    "kit": ("kit", write_kit),
    "capacity": ("capacity", write_capacity),
}


def write_page(page: str, folder: Path) -> str:
    """The page with every table made anew from the folder's files, newest release first."""
    for mark, (what, write) in WRITERS.items():
        files = sorted(folder.glob(f"*-{what}.jsonl"), reverse=True)
        runs = {path.name.rpartition("-")[0]: read_records([path])[0] for path in files}
        page = fill(page, mark, write(runs))
    return page


def main() -> None:
    """Write the page."""
    update(PAGE, lambda held: write_page(held, FOLDER))


if __name__ == "__main__":
    main()

"""A system's answers beside plain decoding's: what must hold before its speed is printed."""

from typing import Any

from benchmarks.engine.answers import find_parting, is_tie

__all__ = ["check_records", "find_faults", "system"]

Record = dict[str, Any]
TAKEN_OUT = ("output_ids", "leads")


def system(record: Record) -> tuple[Any, ...]:
    """What decodes, whatever the model and the load."""
    return record["tree"], record["tiers"], record["plugin"], record["replayssm"]


def check_records(records: list[Record], vouchers: list[Record]) -> list[Record]:
    """Records as they are kept, plain decoding first: answers replaced by what was found of them.

    Simulated acceptance answers at random: ``vouchers`` are checked records of a trained model,
    and vouch for the systems whose answers held there. ValueError for other settings.
    """
    base = records[0]
    if base["tree"]:
        raise ValueError(f"plain decoding must come first, got {base['label']}")
    for record in records[1:]:
        for name in ("settings", "versions"):
            if record[name] != base[name]:
                raise ValueError(
                    f"{record['label']}: {name} are {record[name]}, plain decoding's {base[name]}"
                )
    return [_keep(base, record, vouchers) for record in records]


def _keep(base: Record, record: Record, vouchers: list[Record]) -> Record:
    runs = []
    for want, run in zip(base["runs"], record["runs"], strict=True):
        kept = {name: value for name, value in run.items() if name not in TAKEN_OUT}
        if record["accept"] is None:
            kept["answers"] = compare(want, run)
        runs.append(kept)
    record = record | {"runs": runs}
    if record["accept"] is not None:
        record["vouched"] = any(
            system(v) == system(record) and not find_faults(v) for v in vouchers
        )
    return record


def compare(base: Record, run: Record) -> Record:
    """Requests whose prompts were plain decoding's, those answered alike, and the other ones'
    first other token with plain decoding's lead there.

    A conversation's prompts are equal up to the first answer that is not.
    """
    compared, partings = 0, []
    left: set[int] = set()
    leads = base.get("leads") or [[]] * len(base["output_ids"])
    rows = zip(base["rows"], base["output_ids"], run["output_ids"], leads, strict=True)
    for (talk, *_), want, got, lead in rows:
        if talk in left:
            continue
        compared += 1
        parting = find_parting(want, got, lead)
        if parting is not None:
            partings.append(parting)
            left.add(talk)
    alike = compared - len(partings)
    return {"asked": len(base["rows"]), "compared": compared, "alike": alike, "other": partings}


def find_faults(record: Record) -> list[str]:
    """Why a checked record's speed may not be printed."""
    if record["accept"] is not None:
        if record["vouched"]:
            return []
        return [f"{record['label']}: its answers were not checked with a trained model"]
    faults = []
    for run in record["runs"]:
        clear = [pair for pair in run["answers"]["other"] if not is_tie(pair[1])]
        if clear:
            where = f"{record['label']}, load {run['load']}, seed {run['seed']}"
            faults.append(f"{where}: leads lost, clear or unknown: {clear}")
    return faults

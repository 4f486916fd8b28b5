"""Results of one run of the engine in one file: python records.py FOLDER WHAT RESULT.json ...

writes FOLDER/RELEASE-WHAT.jsonl.gz.
"""

import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["read_records", "write_records"]

Record = dict[str, Any]


def read_records(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Records of .json and .jsonl.gz files in order, and the names of files that are not there."""
    records: list[Record] = []
    missing = []
    for path in paths:
        if not path.exists():
            missing.append(path.name)
        elif path.suffix == ".gz":
            records += map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        else:
            records.append(json.loads(path.read_text("utf-8")))
    return records, missing


def write_records(path: Path, records: Iterable[Record]) -> None:
    """One line a record; the same records give the same bytes."""
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def main() -> None:
    """Gather what is there."""
    folder, what, *files = sys.argv[1:]
    records, _ = read_records(map(Path, files))
    if records:
        release = records[0]["versions"]["sglang"]
        write_records(Path(folder) / f"{release}-{what}.jsonl.gz", records)


if __name__ == "__main__":
    main()

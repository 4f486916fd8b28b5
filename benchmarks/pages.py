"""Pages with figures in them: text between markers, and tables."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["fill", "table", "update"]


def fill(text: str, name: str, body: str) -> str:
    """The page with what stands between the markers of ``name`` replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or end not in rest:
        raise ValueError(f"page: expected the lines {begin} and {end}")
    return f"{before}{begin}\n\n{body}\n{end}{after}"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    cells = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def update(page: Path, write: Callable[[str], str]) -> None:
    """The command of a page: write it anew, or with --check exit 1 where it is out of date."""
    parser = argparse.ArgumentParser(description=f"Write {page.name} anew from its files.")
    parser.add_argument("--check", action="store_true")
    held = page.read_text("utf-8")
    text = write(held)
    if parser.parse_args().check:
        sys.exit(f"{page.name} is out of date" if text != held else 0)
    page.write_text(text, "utf-8")

"""Pages with figures in them: text between markers, and tables."""

from collections.abc import Iterable

__all__ = ["fill", "table"]


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

"""Tokens a second over the nodes that are verified: which width pays, what each step brings."""

from typing import Any

from benchmarks.engine.records import count_nodes
from benchmarks.pages import table

__all__ = ["write_nodes", "write_steps"]

Record = dict[str, Any]
FIXED = 40  # nodes of the tree that the steps begin with


def speeds_by_width(records: list[Record], plugin: bool) -> dict[tuple[int, int], float]:
    """Tokens a second by nodes and batch; what the plugin passes on counts for both."""
    trees = {r["tree"] for r in records if r["plugin"]}
    return {
        (count_nodes(record), run["batch"]): run["tokens_per_s"]
        for record in records
        if record["plugin"] == plugin or record["tree"] not in trees
        for run in record["runs"]
    }


def write_nodes(records: list[Record]) -> str:
    """Tokens a second by the nodes in a whole batch."""
    stock, ours = (speeds_by_width(records, plugin) for plugin in (False, True))
    rows = [
        [str(nodes * batch), f"{batch} x {nodes}", f"{stock[nodes, batch]:.0f}",
         f"{ours[nodes, batch]:.0f}"]
        for nodes, batch in sorted(stock, key=lambda key: (key[0] * key[1], key[1]))
    ]  # fmt: skip
    return table(["nodes in a batch", "requests x nodes", "SGLang", "bolegen"], rows)


def write_steps(records: list[Record], states: list[Record]) -> str:
    """Tokens a second, cumulatively: one width of SGLang's, its best, the plugin's verifier with a
    state stored for every node (``states``, of few widths), and with factors.
    """
    stock, ours = (speeds_by_width(records, plugin) for plugin in (False, True))
    drafted = {r["tree"] for r in records if r["plugin"]}
    passed = [r for r in records if r["tree"] not in drafted]
    stored = speeds_by_width([*passed, *states], True) if states else {}
    rows = []
    for batch in (run["batch"] for run in records[0]["runs"]):
        fixed = stock[FIXED, batch]
        cells = [str(batch), f"{fixed:.0f}"]
        for speeds in (stock, stored, ours):
            widths = [n for n, b in speeds if b == batch]
            nodes = max(widths, key=lambda n: speeds[n, batch], default=0)
            best = speeds.get((nodes, batch), 0.0)
            cells.append(f"{best:.0f} ({nodes}), {best / fixed:.2f}x" if nodes else "")
        rows.append(cells)
    steps = ["+ a width by batch", "+ parallel verifier, states stored", "+ factors"]
    return table(["batch", f"SGLang's trees of {FIXED}", *steps], rows)

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
        (count_nodes(record, run["batch"]), run["batch"]): run["tokens_per_s"]
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


def write_steps(records: list[Record]) -> str:
    """Tokens a second: one width, the best of SGLang's, the best with the plugin."""
    stock, ours = (speeds_by_width(records, plugin) for plugin in (False, True))
    rows = []
    for batch in (run["batch"] for run in records[0]["runs"]):
        fixed = stock[FIXED, batch]
        cells = [str(batch), f"{fixed:.0f}"]
        for speeds in (stock, ours):
            nodes = max((n for n, b in speeds if b == batch), key=lambda n: speeds[n, batch])
            best = speeds[nodes, batch]
            cells.append(f"{best:.0f} ({nodes}), {best / fixed:.2f}x")
        rows.append(cells)
    head = ["batch", f"SGLang's trees of {FIXED}", "+ a width by batch", "+ bolegen"]
    return table(head, rows)

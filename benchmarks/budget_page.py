"""The tables of docs/budget.md and docs/plots/budget.svg, from docs/budget.jsonl and profiles."""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import fill, table

__all__ = ["PAGE", "render"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/budget.md"

Line = dict[str, Any]


def render(lines_file: Path, *, page: Path = PAGE, plots: bool = True) -> None:
    """Write the simulation's table, and the plot."""
    lines = [json.loads(line) for line in lines_file.read_text("utf-8").splitlines()]
    page.write_text(fill(page.read_text("utf-8"), "simulation", _simulation(lines)), "utf-8")
    if plots:
        _draw(lines, page.parent / "plots/budget.svg")


def _simulation(lines: list[Line]) -> str:
    """A table a batch size."""
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    cases = {(line["batch"], line["width"], line["policy"]): line for line in lines}
    parts = [
        f"Recording: {lines[0]['recording']}. Tokens a node, and tokens a round of the slowest "
        f"tenth of the requests; means over {lines[0]['orders']} orders of the requests.\n"
    ]
    for batch in dict.fromkeys(line["batch"] for line in lines):
        rows = []
        for width in dict.fromkeys(line["width"] for line in lines):
            found = [cases[batch, width, policy] for policy in policies]
            cells = [f"{n['per_node'][0]:.3f}, {n['slowest_tenth'][0]:.2f}" for n in found]
            ours, fixed = found[:2]
            spread = f"{ours['per_node'][1]:.3f} to {ours['per_node'][2]:.3f}"
            gain = f"{100 * (ours['per_node'][0] / fixed['per_node'][0] - 1):+.0f} %"
            calibration = f"{ours['expected_over_accepted'][0]:.2f}"
            rows.append([str(width), *cells, spread, gain, calibration])
        head = ["nodes a request", *policies, f"spread, {policies[0]}", f"over {policies[1]}"]
        parts.append(f"### {batch} requests at a time\n")
        parts.append(table([*head, "expected / accepted"], rows))
    return "\n".join(parts)


def _draw(lines: list[Line], file: Path) -> None:
    from benchmarks.plots import draw_panels

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        series = panels.setdefault(f"{line['batch']} requests", {})
        series.setdefault(line["policy"], []).append((line["width"], line["per_node"][0]))
    draw_panels(panels, "nodes a request", "tokens a node", file)

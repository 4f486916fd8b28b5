"""Plots of the comparison: speed-up, time against the floor, memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.render import Lines

__all__ = ["draw_all", "draw_panels"]

# the same bytes for the same numbers
_STYLE: Any = {"svg.hashsalt": "bolegen", "svg.fonttype": "none", "font.size": 9}
_MODEL = {"model": "9B", "state": "fp32"}


def draw_all(lines: Lines, folder: Path) -> list[Path]:
    """Write speed-up.svg, floor.svg and memory.svg; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        return [
            _save(_speed_up(lines), folder / "speed-up.svg"),
            _save(_floor(lines), folder / "floor.svg"),
            _save(_memory(lines), folder / "memory.svg"),
        ]


def draw_panels(
    panels: dict[str, dict[str, list[tuple[float, float]]]], x_label: str, y_label: str, path: Path
) -> None:
    """Lines of points by name, a panel a title; x is logarithmic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.5 * len(panels), 3.4))
        for at, (title, series) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), at)
            axes.set_title(title)
            _lines(axes, series, x_label, y_label)
        figure.tight_layout()
        _save(figure, path)


def _speed_up(lines: Lines) -> Figure:
    figure = Figure(figsize=(9, 3.4))
    for at, part in enumerate(("core", "solve")):
        axes = figure.add_subplot(1, 2, at + 1)
        series: dict[str, list[tuple[float, float]]] = {}
        for line in lines.cases("verify", **_MODEL):
            mine, theirs = (lines.us(line["case"], f"{who}.{part}") for who in ("ours", "sglang"))
            if mine and theirs:
                point = (line["batch"], theirs / mine)
                series.setdefault(f"{line['tree']}, T={line['nodes']}", []).append(point)
        _lines(axes, series, "requests", f"speed-up of the {part} over SGLang")
        axes.axhline(1, color="grey", linewidth=0.8)
    return figure


def _floor(lines: Lines) -> Figure:
    figure = Figure(figsize=(9, 3.4))
    for at, tree in enumerate(("333", "eagle64")):
        axes = figure.add_subplot(1, 2, at + 1)
        series: dict[str, list[tuple[float, float]]] = {}
        for line in lines.cases("verify", tree=tree, **_MODEL):
            case = line["case"]
            shown = {
                "core": lines.us(case, "ours.core"),
                "solve": lines.us(case, "ours.solve"),
                "floor of the core": lines.of(case, "ours.core", "floor_us"),
                "traffic kernel": lines.us(case, "traffic"),
                "SGLang's solve": lines.us(case, "sglang.solve"),
            }
            for name, us in shown.items():
                if us:
                    series.setdefault(name, []).append((line["batch"], us))
        _lines(axes, series, "requests", f"us a layer, {tree}")
        axes.set_yscale("log")
    return figure


def _memory(lines: Lines) -> Figure:
    figure = Figure(figsize=(5, 3.4))
    series: dict[str, list[tuple[float, float]]] = {}
    for suite in ("verify", "scaling"):
        for line in lines.cases(suite, **_MODEL):
            nodes, batch = line["nodes"], line["batch"]
            shown = {
                "snapshots": nodes * line["snapshot_bytes"],
                "factors": line["round_bytes"] / batch,
                "scratch of one layer": line["scratch_bytes"] / batch,
            }
            for name, size in shown.items():
                series.setdefault(name, []).append((nodes, size / 2**20))
    axes = figure.add_subplot()
    # weights that are kept once a layer weigh on small batches: show the leanest
    leanest = {name: _least(points) for name, points in series.items()}
    _lines(axes, leanest, "nodes", "MiB a request and layer")
    axes.set_yscale("log")
    return figure


def _least(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    best: dict[float, float] = {}
    for x, y in points:
        best[x] = min(y, best.get(x, y))
    return list(best.items())


def _lines(
    axes: Axes, series: dict[str, list[tuple[float, float]]], x_label: str, y_label: str
) -> None:
    ticks: set[float] = set()
    for name, points in series.items():
        places, heights = zip(*sorted(points), strict=True)
        axes.plot(places, heights, marker="o", markersize=3, label=name)
        ticks |= set(places)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, linewidth=0.3)
    if series:
        axes.legend(fontsize=7)


def _save(figure: Figure, path: Path) -> Path:
    metadata: dict[str, Any] = {"Date": None}
    figure.savefig(path, bbox_inches="tight", metadata=metadata)
    return path

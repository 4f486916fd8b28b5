"""Tables of docs/performance.md and plots of docs/plots/, from docs/compare.jsonl alone.

``python benchmarks/render.py`` takes the last line of each case and system; lines of several
runs may stand in one file. ``--no-plots`` needs no matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.accuracy import accuracy_table  # noqa: E402
from benchmarks.mixer_table import mixer_table  # noqa: E402
from benchmarks.pages import fill, table  # noqa: E402

__all__ = ["Lines", "fill_page", "main", "read_lines", "tables"]


Line = dict[str, Any]
Row = list[str]


def main() -> int:
    """Write the page's tables, and the plots where there is something to plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, default=ROOT / "docs/compare.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs/plots")
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args()
    text = options.lines.read_text("utf-8") if options.lines.is_file() else ""
    lines = read_lines(text)
    options.page.write_text(fill_page(options.page.read_text("utf-8"), lines), "utf-8")
    if lines.times and not options.no_plots:
        from benchmarks.plots import draw_all

        draw_all(lines, options.plots)
    return 0


class Lines:
    """The last line of each case and system, what took long to compile, and what is missing."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.times: dict[tuple[str, str], Line] = {}
        self.compiled: dict[tuple[str, bool], Line] = {}
        self.missing: dict[str, Line] = {}
        for line in lines:
            self._take(line)

    def _take(self, line: Line) -> None:
        """One line; what comes later wins, and a wrong answer withdraws the case."""
        kind, case = line["kind"], line.get("case", "")
        if kind == "time":
            self.missing.pop(case, None)
            self.times[case, line["system"]] = line
        elif kind == "compile" and "error" not in line:
            self.compiled[case, line["ours"]] = line
        elif kind == "refused":
            self.times = {key: old for key, old in self.times.items() if key[0] != case}
            self.missing[case] = line
        elif kind == "failed" or (kind == "skipped" and not self._measured(case)):
            self.missing[case] = line

    def _measured(self, case: str) -> bool:
        return any(known == case for known, _ in self.times)

    def cases(self, suite: str, **wanted: Any) -> list[Line]:
        """The line of ours for each case of a suite whose fields are as wanted."""
        found: dict[str, Line] = {}
        for (case, system), line in self.times.items():
            fits = line["suite"] == suite and all(line[k] == v for k, v in wanted.items())
            if fits and system.startswith("ours"):
                found.setdefault(case, line)
        return sorted(found.values(), key=_order)

    def us(self, case: str, system: str) -> float | None:
        """Microseconds of a system in a case."""
        line = self.times.get((case, system))
        return None if line is None else float(line["us"])

    def of(self, case: str, system: str, field: str) -> Any:
        """Another field of a line, None where there is none."""
        return self.times.get((case, system), {}).get(field)


def read_lines(text: str) -> Lines:
    """Parse JSON lines."""
    return Lines(json.loads(line) for line in text.splitlines() if line.strip())


def fill_page(page: str, lines: Lines) -> str:
    """The page with its tables written anew between the markers."""
    return fill(page, "tables", tables(lines))


def tables(lines: Lines) -> str:
    """All tables, or that there are none yet."""
    if not lines.times:
        return "Not yet measured.\n"
    parts = [
        _where(lines),
        _verify(lines, "core", "Whole verify core: convolution, gates, factors, solve"),
        _verify(lines, "solve", "Factors and solve on convolved rows"),
        _floors(lines),
        _mixers(lines),
        _accuracy(lines),
        _chains(lines),
        _runtime(lines),
        _commits(lines),
        _rounds(lines),
        _scaling(lines),
        _compiles(lines),
        _left_out(lines),
    ]
    return "\n".join(part for part in parts if part)


def _where(lines: Lines) -> str:
    runs: dict[str, None] = {}
    for line in lines.times.values():
        run = line["run"]
        peers = ", ".join(f"{name} {version}" for name, version in run["peers"].items())
        said = f"{run['device']}, driver {run['driver']}, torch {run['torch']}, "
        said += f"Triton {run['triton']}; {peers or 'no peers'}; copy {run['copy_TBps']:.2f} TB/s"
        runs[said] = None
    return "\n".join(["Measured on:", "", *(f"- {run}" for run in runs), ""])


def _verify(lines: Lines, part: str, title: str) -> str:
    """Ours, SGLang's serial tree path, and the ratio."""
    rows = []
    for line in lines.cases("verify"):
        case = line["case"]
        mine, theirs = lines.us(case, f"ours.{part}"), lines.us(case, f"sglang.{part}")
        if mine is not None and theirs is not None:
            spread = _spread(lines, case, f"ours.{part}")
            rows.append([*_name(line), _us(theirs), _us(mine), spread, _ratio(theirs, mine)])
    head = [*_NAME, "SGLang", "ours", "least to most", "speed-up"]
    return _table(title + ", us a layer", head, rows)


def _floors(lines: Lines) -> str:
    """Ours over the memory floor, and the solve kernel over the traffic kernel."""
    rows = []
    for line in lines.cases("verify"):
        case = line["case"]
        mine, floor = lines.us(case, "ours.core"), lines.of(case, "ours.core", "floor_us")
        if mine is None or floor is None:
            continue
        kernels = lines.of(case, "ours.core", "kernels_us") or {}
        parts = ", ".join(f"{name} {us}" for name, us in kernels.items())
        moved = lines.us(case, "traffic")
        solve = _ratio(kernels.get("solve"), moved)
        rows.append([*_name(line), _us(floor), _us(mine), _ratio(mine, floor), _us(moved), solve,
                     parts])  # fmt: skip
    head = [*_NAME, "floor", "core", "core / floor", "traffic", "solve / traffic", "kernels"]
    return _table("Distance from the floors, us a layer", head, rows)


def _mixers(lines: Lines) -> str:
    """Mixers other than gdn beside the peer's verifiers of them."""
    found = mixer_table(lines.cases("mixer"), lambda *key: lines.times.get(key))
    return _table("Other mixers, us a layer", *found)


def _accuracy(lines: Lines) -> str:
    """What the opt-ins cost in accuracy and gain in time."""
    keys = [(line["case"], f"ours.{part}") for line in lines.cases("accuracy")
            for part in ("core", "solve")]  # fmt: skip
    found = [lines.times[key] for key in keys if key in lines.times]
    return _table("Accuracy against speed, us a layer", *accuracy_table(found))


def _chains(lines: Lines) -> str:
    """The best verifier of chains that can roll back."""
    rows = []
    for line in lines.cases("verify"):
        if not line["tree"].startswith("chain"):
            continue
        for part in ("solve", "core"):
            case = line["case"]
            mine = lines.us(case, f"ours.{part}")
            peers = {
                peer: lines.us(case, f"{peer}.{part}")
                for peer in ("sglang", "replayssm0", "replayssm8", "flashinfer")
            }
            known = [us for us in peers.values() if us is not None]
            if mine is None or not known:
                continue
            cells = [_us(us) for us in peers.values()]
            rows.append([*_name(line), part, *cells, _us(mine), _ratio(min(known), mine)])
    head = [*_NAME, "part", "SGLang serial", "ReplaySSM, empty ring", "ReplaySSM, 8 held",
            "FlashInfer", "ours", "over the best"]  # fmt: skip
    return _table("Chains of 8 nodes, us a layer", head, rows)


def _runtime(lines: Lines) -> str:
    """Topology given at run time over the same tree compiled in."""
    rows = []
    for line in lines.cases("verify"):
        case = line["case"]
        if not line["tree"].startswith("any:"):
            continue
        static = case.replace("any:", "")
        for part in ("core", "solve"):
            given, known = (lines.us(each, f"ours.{part}") for each in (case, static))
            rows.append([*_name(line), part, _us(known), _us(given), _ratio(given, known)])
    head = [*_NAME, "part", "compiled in", "at run time", "ratio"]
    return _table("Topology at run time, us a layer", head, rows)


def _commits(lines: Lines) -> str:
    """All layers' commits."""
    rows = []
    for line in lines.cases("commit"):
        case = line["case"]
        mine, theirs = lines.us(case, "ours.commit"), lines.us(case, "sglang.commit")
        floor = lines.of(case, "ours.commit", "floor_us")
        rows.append([*_name(line), str(line["layers"]), _us(floor), _us(theirs), _us(mine),
                     _ratio(theirs, mine)])  # fmt: skip
    head = [*_NAME, "layers", "floor", "SGLang's scatters", "ours", "speed-up"]
    return _table("Commit of all layers, convolution windows included, us", head, rows)


def _rounds(lines: Lines) -> str:
    """A commit and the verify after it, apart and as one; a run covers all layers."""
    rows = []
    for line in lines.cases("round"):
        case, names = line["case"], ("sglang.round", "ours.apart", "ours.folded")
        theirs, apart, folded = all_us = [lines.us(case, name) for name in names]
        all_us.insert(0, lines.of(case, names[2], "floor_us"))
        rows.append([*_name(line), *(_us(us and us / line["layers"]) for us in all_us),
                     _ratio(apart, folded), _ratio(theirs, folded)])  # fmt: skip
    head = [*_NAME, "floor", "SGLang", "two steps", "folded", "over two steps", "over SGLang"]
    return _table("Round: commit of the last one and verify, us a layer", head, rows)


def _scaling(lines: Lines) -> str:
    """Ours over nodes, depth and batch."""
    rows = []
    for line in lines.cases("scaling"):
        case = line["case"]
        rows.append([
            *_name(line), str(line["depth"]), _us(lines.us(case, "ours.core")),
            _us(lines.us(case, "ours.solve")), f"{line['round_bytes']:,}",
            f"{line['scratch_bytes']:,}",
            f"{line['batch'] * line['nodes'] * line['snapshot_bytes']:,}",
        ])  # fmt: skip
    head = [*_NAME, "depth", "core", "solve", "factors, B a layer", "scratch, B", "snapshots, B"]
    return _table("Scaling, us a layer and bytes", head, rows)


def _compiles(lines: Lines) -> str:
    """Seconds to compile: text, then Triton with an empty cache where the run says so."""
    rows = []
    for line in lines.compiled.values():
        seconds = line["build_s"]
        name = "ours.core" if line["ours"] else "sglang.core"
        if seconds.get(name, 0) > 0.5 and ("scaling" in line["case"] or not line["ours"]):
            text = f"{line['text_s']:.2f}" if line["ours"] else ""
            rows.append([line["case"], name, text, f"{seconds[name]:.1f}"])
    head = ["case", "system", "text", "Triton, first call"]
    return _table("Compile times, s, each in one of several processes", head, rows)


def _left_out(lines: Lines) -> str:
    rows = [[case, line["kind"], str(line["error"])] for case, line in lines.missing.items()]
    return _table("Not measured", ["case", "what", "why"], rows)


_NAME = ["model", "tree", "T", "B", "state"]


def _name(line: Line) -> Row:
    return [str(line[field]) for field in ("model", "tree", "nodes", "batch", "state")]


def _order(line: Line) -> tuple[Any, ...]:
    models = ("9B", "27B", "122B")
    place = models.index(line["model"]) if line["model"] in models else len(models)
    return (
        place,
        line["model"],
        line["state"] != "fp32",
        line["nodes"],
        line["depth"],
        line["tree"],
        line["batch"],
    )


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(one: float | None, other: float | None) -> str:
    return "" if not one or not other else f"{one / other:.2f}x"


def _spread(lines: Lines, case: str, system: str) -> str:
    return " to ".join(_us(lines.of(case, system, field)) for field in ("min_us", "max_us"))


def _table(title: str, head: Row, rows: list[Row]) -> str:
    return f"### {title}\n\n{table(head, rows)}" if rows else ""


if __name__ == "__main__":
    sys.exit(main())

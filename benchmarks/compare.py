# mypy: allow-untyped-calls
"""Our modules beside their peers on one GPU: ``make bench``, or this file with options.

Every system is judged against a float64 reference, in plain launches and in graph replays; where
one is wrong, the case shows no speed at all and the exit status is 1. Then all are timed in this
one process by graph replays over operands that the L2 cache does not hold. One JSON line a
system goes to ``--out``; ``benchmarks/render.py`` makes the page and the plots of them.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

import torch  # noqa: E402

from benchmarks import contest, offline  # noqa: E402
from benchmarks.cases import Case, list_cases, list_mixers, list_scaling, tree_depth  # noqa: E402
from benchmarks.operands import Operands  # noqa: E402
from benchmarks.systems import Ours, System  # noqa: E402
from benchmarks.timing import (  # noqa: E402
    WrongResultError,
    describe,
    kernel_times,
    measure,
    replay_times,
    spin_up,
)
from benchmarks.traffic import copy_seconds, floor_bytes, round_bytes  # noqa: E402

__all__ = ["main"]


def main() -> int:
    """0 where every system that was run was right."""
    options = _parse()
    pattern = re.compile(options.only)
    listed = list_scaling if options.scaling else list_mixers if options.mixers else list_cases
    cases = [case for case in listed() if pattern.search(case.key)]
    if options.list:
        print(*(case.key for case in cases), sep="\n")
        return 0
    if options.compile_only:
        return _compile_only(cases)
    if not torch.cuda.is_available():
        raise SystemExit("compare: no CUDA device here; --compile-only needs none")
    if options.scaling:
        # compile times are those of an empty cache
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="bolegen-triton-")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a" if options.append else "w", encoding="utf-8") as file:
        return _Run(file, options).play(cases)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/compare.jsonl")
    parser.add_argument("--append", action="store_true", help="keep the lines that --out has")
    suites = parser.add_mutually_exclusive_group()
    suites.add_argument("--scaling", action="store_true", help="ours alone, over T, depth and B")
    suites.add_argument("--mixers", action="store_true", help="mixers other than gdn")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases by name, see --list")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--limit-s", type=float, default=540, help="start no case after this")
    parser.add_argument("--case-limit-s", type=float, default=120, help="end the run after this")
    parser.add_argument("--workers", type=int, default=16, help="processes that compile ahead")
    parser.add_argument("--flashinfer", type=Path, help="a compiled library, for chains")
    parser.add_argument("--compile-only", action="store_true", help="for sm_90, without a GPU")
    return parser.parse_args()


def _compile_only(cases: list[Case]) -> int:
    """Build every kernel that these cases launch; 1 where one does not build."""
    offline.install()
    failed = False
    for task in contest.list_tasks(cases):
        for record in contest.build_task(task, "cpu"):
            print(json.dumps(record), flush=True)
            failed |= "error" in record
    return int(failed)


class _Run:
    """One run: where its lines go, when it must end, and what every line says."""

    def __init__(self, file: TextIO, options: argparse.Namespace) -> None:
        self.file, self.workers, self.flashinfer = file, options.workers, options.flashinfer
        self.end: float = time.monotonic() + options.limit_s
        self.case_limit_s: float = options.case_limit_s
        self.about: dict[str, Any] = {}
        self.wrong = 0

    def play(self, cases: list[Case]) -> int:
        """Compile ahead, take the ceiling, then case by case."""
        self.about = describe()
        late = self._build_ahead(cases)
        spin_up()
        copy = copy_seconds(lambda run: replay_times(run).median_us * 1e-6)
        self.about["copy_TBps"] = round(1e-12 / copy, 3)
        self._write({"kind": "ceiling"})
        for case in cases:
            if self._left() < 0 or case.key in late:
                why = "not compiled in time" if case.key in late else "out of time"
                self._write({"kind": "skipped", "case": case.key, "error": why})
                continue
            watch = threading.Timer(self.case_limit_s, self._give_up, [case])
            watch.start()
            self._case(case)
            watch.cancel()
            torch.cuda.empty_cache()
        return int(self.wrong > 0)

    def _build_ahead(self, cases: list[Case]) -> set[str]:
        """Compile in other processes; the cases that were not ready in time."""
        tasks = contest.list_tasks(cases) if self.workers else []
        waiting = {(case.key, mine) for group, mine in tasks for case in group}
        for record in contest.build_ahead(tasks, self.workers, 0.6 * self._left()):
            waiting.discard((record["case"], record["ours"]))
            self._write(record)
        return {key for key, _ in waiting}

    def _case(self, case: Case) -> None:
        """All systems of a case; a wrong answer withdraws every speed of it."""
        lines: list[dict[str, Any]] = []
        try:
            lines.extend(self._contest(case))
        except WrongResultError as error:
            self.wrong += 1
            lines = [{"kind": "refused", "case": case.key, "error": str(error)}]
        except Exception as error:  # what was right before it stays
            self.wrong += 1
            said = f"{type(error).__name__}: {error}"[:500]
            lines.append({"kind": "failed", "case": case.key, "error": said})
        for line in lines:
            self._write(line)

    def _give_up(self, case: Case) -> None:
        """End a run whose case hangs: nothing else stops a kernel that does not return."""
        said = f"over {self.case_limit_s:g} s; the run ended here"
        self._write({"kind": "failed", "case": case.key, "error": said})
        os._exit(1)

    def _contest(self, case: Case) -> Iterator[dict[str, Any]]:
        r = contest.draw(case, "cuda")
        common, exact = _common(case, r), contest.remember(r)
        mine, entries = contest.ours(case, r, exact)
        sets = 1 if case.whole else r.sets
        for entry in entries:
            system = entry()
            yield common | self._time(system, sets) | _about_ours(mine, system, r, self.about)
        del mine, entries, entry, system
        for entry in contest.peers(case, r, exact, self.flashinfer):
            yield common | self._time(entry(), sets)

    def _time(self, system: System, sets: int) -> dict[str, Any]:
        timing, worst = measure(system, sets)
        return {"system": system.name, "layers": system.layers, "error": worst} | timing.record

    def _left(self) -> float:
        return self.end - time.monotonic()

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record | {"run": self.about})
        self.file.write(line + "\n")
        self.file.flush()
        said = {k: v for k, v in record.items() if k in ("case", "kind", "system", "us", "error")}
        print(json.dumps(said), flush=True)


def _common(case: Case, r: Operands) -> dict[str, Any]:
    """What every line of a case says."""
    spec, shape = case.spec, case.shape
    return {
        "kind": "time",
        "case": case.key,
        "suite": case.suite,
        "model": case.model,
        "mixer": shape.mixer.name,
        "tree": case.tree,
        "nodes": len(r.parents),
        "depth": tree_depth(r.parents),
        "batch": case.batch,
        "state": case.state,
        "numerics": case.numerics,
        "heads": [shape.key_heads, shape.value_heads],
        "dims": [shape.d_k, shape.d_v],
        "dtype": str(r.x.dtype).removeprefix("torch."),
        "sets": r.sets,
        "snapshot_bytes": spec.snapshot_bytes,
    }


def _about_ours(mine: Ours, system: System, r: Operands, about: dict[str, Any]) -> dict[str, Any]:
    """The module, its memory a layer, the floor in microseconds, and each kernel's time."""
    if not system.name.startswith("ours"):
        return {}
    found: dict[str, Any] = {
        "module": mine.module.MODULE.name,
        "digest": mine.module.MODULE.digest,
        "round_bytes": mine.factors.round_bytes // r.sets,
        "scratch_bytes": mine.factors.scratch_bytes,
    }
    if r.case.suite == "commit":
        moved = 2 * r.sets * r.case.batch * r.state[0, 0].numel() * r.state.element_size()
        return found | {"floor_us": round(moved * 1e-6 / about["copy_TBps"], 3)}
    if r.case.suite == "round":
        return found | {"floor_us": round(round_bytes(r) * 1e-6 / about["copy_TBps"], 3)}
    moved = floor_bytes(r, convolved=system.name == "ours.solve")
    found["floor_us"] = round(moved * 1e-6 / about["copy_TBps"], 3)
    if r.case.suite == "accuracy":
        found["errors"] = mine.errors(r.sets - 1)
    if r.case.suite in ("verify", "mixer"):
        found["kernels_us"] = kernel_times(system, r.sets)
    return found


if __name__ == "__main__":
    sys.exit(main())

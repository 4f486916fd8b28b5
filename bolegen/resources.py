"""Registers, spills and shared memory of every checked-in module on every target, as a table.

``python -m bolegen.resources`` builds them all, without a GPU, and compares them with
docs/resources.json for the installed Triton; ``--write`` refreshes it and docs/resources.md.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bolegen.aot import KernelReport, build_module, triton_version
from bolegen.checked import CHECKED_IN, compile_all
from bolegen.errors import BolegenError, CheckError
from bolegen.ir import TARGETS

__all__ = ["main", "measure", "render"]

# Triton's version -> module -> target -> kernel -> [registers, spill, shared memory, products]
Table = dict[str, dict[str, dict[str, list[int]]]]

_FILE = Path("docs/resources.json")
_PAGE = Path("docs/resources.md")
_HEAD = """# What each kernel takes

Per program thread: registers, bytes spilled; per program: bytes of shared memory.
Written by `python -m bolegen.resources --write`, compared by `make aot`; no GPU is needed.
Limits of shared memory: {limits}.

{spills}
"""

_WHY = """On NVIDIA a solve of bf16 operands is capped at 128 or 168 registers, a factor that
follows channels up a tree at 128, so that four or three programs share a multiprocessor
(`Tiling.maxnreg`, `maxnreg_factor`); the few values that do not fit under a cap are the price of
that. `merged` is the solve of one request where it cannot start beside factor: it does factor's
work as well, and has no cap. `folded` is the solve that commits the round before first, under a
cap of 168 (`maxnreg_folded`). Commit has no cap: one warp holds a state tile of 128 values a
thread.
What spills:

"""


def main(arguments: list[str] | None = None) -> int:
    """Compare the table with what the compiler and this Triton give; 0 where they agree."""
    parser = argparse.ArgumentParser(prog="python -m bolegen.resources", description=__doc__)
    parser.add_argument("--write", action="store_true", help="refresh the table instead")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    version = triton_version()
    try:
        table = measure(options.workers)
        known = json.loads(_FILE.read_text("utf-8")) if _FILE.is_file() else {}
        if options.write:
            known[version] = table
            text = json.dumps(known, indent=1, sort_keys=True)
            _FILE.write_text(text + "\n", "utf-8")
            _PAGE.write_text(render(json.loads(text)), "utf-8")
        elif known.get(version) != table:
            raise CheckError(_difference(known.get(version, {}), table, version))
    except BolegenError as error:
        print(f"bolegen: {error}", file=sys.stderr)
        return 1
    print(f"Triton {version}: {len(table)} modules build and fit on {', '.join(TARGETS)}")
    return 0


def measure(workers: int) -> Table:
    """Build every module for every target; CheckError where one does not fit."""
    jobs = [(index, target) for index in range(len(CHECKED_IN)) for target in TARGETS]
    table: Table = {}
    with ProcessPoolExecutor(workers) as pool:
        for done, (name, target, reports) in enumerate(pool.map(_job, jobs), 1):
            print(f"[{done}/{len(jobs)}] {name} for {target}", file=sys.stderr, flush=True)
            for report in reports:
                if not report.fits:
                    raise CheckError(
                        f"{name}: {report.kernel} takes {report.smem_bytes} bytes of shared "
                        f"memory, {target} has {TARGETS[target].smem_bytes}"
                    )
            table.setdefault(name, {})[target] = {r.kernel: _numbers(r) for r in reports}
    return table


def _job(job: tuple[int, str]) -> tuple[str, str, tuple[KernelReport, ...]]:
    index, target = job
    emitted = compile_all()[index]
    return emitted.name, target, build_module(emitted, TARGETS[target])


def _numbers(report: KernelReport) -> list[int]:
    return [report.registers, report.spill_bytes, report.smem_bytes, report.dots]


def _difference(known: Table, table: Table, version: str) -> str:
    for name, targets in table.items():
        for target, kernels in targets.items():
            for kernel, numbers in kernels.items():
                was = known.get(name, {}).get(target, {}).get(kernel)
                if was != numbers:
                    return (
                        f"{name}, {kernel} on {target} under Triton {version}: registers, spill, "
                        f"shared memory, products were {was}, now {numbers}; if that is meant, "
                        "run `python -m bolegen.resources --write`"
                    )
    return f"{_FILE} lists modules that are gone; run `python -m bolegen.resources --write`"


def render(known: dict[str, Table]) -> str:
    """The table for people: a section a module, a line a kernel, a column a target."""
    limits = ", ".join(f"{t.name} {t.smem_bytes:,}" for t in TARGETS.values())
    parts = [_HEAD.format(limits=limits, spills=_spills(known))]
    for name in next(iter(known.values())):
        parts.append(f"## {name}\n")
        parts.append("| Triton | kernel | " + " | ".join(TARGETS) + " |")
        parts.append("| --- | --- |" + " --- |" * len(TARGETS))
        for version in sorted(known):
            targets = known[version].get(name, {})
            for kernel in next(iter(targets.values()), {}):
                cells = [_cell(targets[target][kernel]) for target in TARGETS]
                parts.append(f"| {version} | {kernel} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(numbers: list[int]) -> str:
    registers, spill, smem, _ = numbers
    return f"{registers} / {spill} / {smem:,}"


def _spills(known: dict[str, Table]) -> str:
    found = [
        f"{kernel} of {name} on {target} under Triton {version} ({numbers[1]} bytes)"
        for version, table in sorted(known.items())
        for name, targets in table.items()
        for target, kernels in targets.items()
        for kernel, numbers in kernels.items()
        if numbers[1]
    ]
    if not found:
        return "Nothing spills."
    return _WHY + "\n".join(f"- {line}" for line in found)


if __name__ == "__main__":
    sys.exit(main())

# mypy: allow-untyped-calls
"""Who competes in a case, and the compilation of all of them ahead, in parallel processes."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import offline
from benchmarks.cases import Case
from benchmarks.operands import STATES, Operands, draw_operands
from benchmarks.peers.calls import CONV_MAX_NODES, Commit, Replay, Serial
from benchmarks.peers.flashinfer import FlashInfer
from benchmarks.peers.mixers import SERIAL
from benchmarks.peers.rounds import SerialRound
from benchmarks.reference import Exact, solve_exactly
from benchmarks.systems import Ours, System
from benchmarks.timing import count_sets
from benchmarks.traffic import traffic
from benchmarks.two_rounds import OurRound
from support.rounds import import_module

__all__ = ["build_ahead", "build_task", "draw", "list_tasks", "ours", "peers", "remember"]

# cases that one process builds, and whether it builds ours or the peers' side of them
Task = tuple[tuple[Case, ...], bool]
# a system, made when its turn comes
Entry = Callable[[], System]
Reference = Callable[[int], Exact]


def draw(case: Case, device: str) -> Operands:
    """Operands of enough layers: all, where a run covers them, else more than L2 holds."""
    shape = case.shape
    head_bytes = shape.d_v * shape.d_k * STATES[case.state].itemsize
    sets = count_sets(case.batch * shape.value_heads * head_bytes)
    return draw_operands(case, shape.layers if case.whole else sets, device)


def ours(case: Case, r: Operands, exact: Reference) -> tuple[Ours, list[Entry]]:
    """Our module on a case, and what of it is timed."""
    mine = Ours(import_module(case.compile()), r, exact)
    if case.suite == "commit":
        return mine, [mine.commit]
    if case.suite == "round":
        both = OurRound(mine)
        return mine, [both.apart, both.folded]
    entries: list[Entry] = [mine.verify, mine.verify_qkv]
    if case.suite == "verify" and not case.runtime:
        entries += [partial(traffic, r, deltas=deltas) for deltas in (False, True)]
    return mine, entries


def peers(
    case: Case, r: Operands, exact: Reference, flashinfer: Path | None = None
) -> Iterator[Entry]:
    """The peers of a case; none where one with the same tree compiled in has them already.

    ``flashinfer`` is a library that holds its kernels.
    """
    if case.suite == "commit":
        yield Commit(r).commit
    if case.suite == "round":
        yield SerialRound(r, exact).round
    if not _has_serial(case):
        return
    serial = SERIAL.get(case.shape.mixer.name, Serial)(r, exact)
    yield serial.solve
    if len(r.parents) <= CONV_MAX_NODES:
        yield from (serial.core, serial.convolution)
    if case.chain and case.state == "fp32":
        for held in (0, 8):
            replay = Replay(serial, held)
            yield from (replay.solve, replay.core)
        if flashinfer is not None:
            yield FlashInfer(serial, flashinfer).solve


def _has_serial(case: Case) -> bool:
    """Whether SGLang verifies such a tree, and no other case times that already."""
    known = case.suite == "verify" or (case.suite == "mixer" and case.shape.mixer.name in SERIAL)
    return known and not case.runtime


def remember(r: Operands) -> Reference:
    """The reference of a layer, computed when it is first asked for."""
    return cache(partial(solve_exactly, r))


def list_tasks(cases: Iterable[Case]) -> list[Task]:
    """What can be built apart: our module for all batches at once, each peer by batch."""
    groups: dict[Any, list[Case]] = {}
    alone = []
    for case in cases:
        group = (case.suite, case.model, case.tree, case.state, case.numerics)
        groups.setdefault(group, []).append(case)
        if case.suite == "commit" or _has_serial(case):
            alone.append(case)
    tasks = [((case,), False) for case in alone] + [(tuple(g), True) for g in groups.values()]
    return sorted(tasks, key=_weight, reverse=True)


def _weight(task: Task) -> int:
    """Roughly how long a task takes: the longest should start first."""
    (case, *_), mine = task
    nodes = len(case.parents)
    # of the peers' kernels only the tree convolution takes long, unrolled over the nodes
    return nodes if mine or not (case.chain or nodes > CONV_MAX_NODES) else 0


def build_ahead(tasks: list[Task], workers: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Run every system once in other processes, so that Triton's cache holds all kernels.

    Yields a record of seconds for each case of a task; what takes longer than ``limit_s`` is
    given up.
    """
    if not tasks:
        return
    end = time.monotonic() + limit_s
    # leaving the block ends the processes, whatever they are at
    pool = get_context("spawn").Pool(min(workers, os.cpu_count() or 1))
    with pool, suppress(TimeoutError):
        done = pool.imap_unordered(partial(build_task, device="cuda"), tasks)
        for _ in tasks:
            yield from done.next(timeout=max(0.0, end - time.monotonic()))


def build_task(task: Task, device: str) -> list[dict[str, Any]]:
    """Build one task; a failure is a record too."""
    cases, mine = task
    records = []
    for case in cases:
        record: dict[str, Any] = {"kind": "compile", "case": case.key, "ours": mine}
        try:
            record |= _build(case, mine, device)
        except Exception as error:  # what fails here fails again, with its name, when timed
            record["error"] = f"{type(error).__name__}: {error}"[:300]
        records.append(record)
    return records


def _build(case: Case, mine: bool, device: str) -> dict[str, Any]:
    start = time.monotonic()
    record: dict[str, Any] = {}
    if mine:
        emitted = case.compile()
        record = {"text_s": round(time.monotonic() - start, 3), "module": emitted.name}
    r = draw_operands(case, 1, device)
    if device == "cpu" and not triton.knobs.runtime.interpret:
        r = replace(r, state=offline.claim_cuda(r.state)) if not mine else r
    seconds, exact = {}, remember(r)
    for entry in ours(case, r, exact)[1] if mine else peers(case, r, exact):
        start = time.monotonic()
        system = entry()
        system.run(0)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[system.name] = round(time.monotonic() - start, 2)
    if device == "cuda":
        del r, system, entry
        torch.cuda.empty_cache()
    return record | {"build_s": seconds}

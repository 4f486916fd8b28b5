# mypy: allow-untyped-calls
"""SGLang's round: both scatters of all layers, then convolution and recurrence of each."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from benchmarks.operands import Operands
from benchmarks.peers.calls import Commit, Serial
from benchmarks.reference import Exact
from benchmarks.systems import System
from benchmarks.two_rounds import draw_next, solve_next

__all__ = ["SerialRound"]


class SerialRound:
    """The snapshots that are scattered are those of the judged layer; others are random."""

    def __init__(self, r: Operands, exact: Callable[[int], Exact]) -> None:
        after = draw_next(r)
        reference = cache(partial(solve_next, after, exact))
        # scattered into: a pool of its own
        self.r = replace(after, state=after.state.clone())
        self.serial, self.commit = Serial(self.r, reference), Commit(self.r)
        self.serial.make_windows()
        self.commit.pools = self.r.state, self.serial.windows
        requests, nodes = self.commit.requests, self.commit.nodes.long()
        snapshots, taken = self.commit.taken
        snapshots.mul_(0.3)
        snapshots[-1, requests, nodes] = exact(r.sets - 1).state.to(snapshots.dtype)
        taken[:, requests, nodes] = after.windows[:, after.slots.long()]

    def round(self) -> System:
        """Commit and verify of all layers."""
        return System("sglang.round", self._run, self._judge, self._restore, self.r.sets)

    def _run(self, _: int) -> torch.Tensor:
        self.commit.scatter_all()
        for i in range(self.r.sets):
            out = self.serial.run_layer(i)
        return out

    def _restore(self) -> None:
        self.serial.restore()
        for pool in self.commit.pools:
            pool.zero_()

    def _judge(self, _: int, out: torch.Tensor) -> dict[str, float]:
        slots, nodes = self.r.slots.long(), self.commit.nodes.long()
        kept = self.commit.taken[0][:, self.commit.requests, nodes]
        same = torch.equal(self.r.state[:, slots], kept)
        found = {"state": 0.0 if same else torch.inf}
        return found | self.serial.judge_core(self.r.sets - 1, out)

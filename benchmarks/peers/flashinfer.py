"""FlashInfer's verify of chains, from a library that was compiled elsewhere.

Its kernel is written in a language whose compiler is too large to carry: build_flashinfer.py makes
the library. It is loaded through tvm-ffi, which may lie beside it; a JSON file of the same name
gives the function for each ``"value heads,batch"``. It takes 8 nodes and float32 states.
"""

import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.operands import split_rows
from benchmarks.peers.calls import OUTPUT_LIMIT, Serial
from benchmarks.reference import over_relative
from benchmarks.systems import System

__all__ = ["FlashInfer"]


class FlashInfer:
    """The function of one shape, on the operands of SGLang's serial kernel."""

    nodes = 8

    def __init__(self, serial: Serial, library: Path) -> None:
        self.serial, self.r = serial, serial.r
        r = self.r
        batch = r.case.batch
        sys.path.append(str(library.parent.resolve()))
        table = json.loads(library.with_suffix(".json").read_text("utf-8"))
        module: Any = importlib.import_module("tvm_ffi").load_module(str(library.resolve()))
        self.verify = module[table[f"{r.case.shape.value_heads},{batch}"]]
        self.out = r.x.new_empty(r.sets, *r.x.shape[1:3], *r.state.shape[2:4])
        index: dict[str, Any] = {"dtype": torch.int32, "device": r.x.device}
        self.unused = torch.zeros(batch + 1, **index), torch.zeros(batch, self.nodes, **index)

    def solve(self) -> System:
        """The recurrence alone, on convolved rows, with a snapshot a node."""
        return System("flashinfer.solve", self._solve, self._judge, self._poison)

    def _solve(self, i: int) -> torch.Tensor:
        r, snapshots = self.r, self.serial.snapshots
        q, k, v = split_rows(r.case, r.rows[i])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.verify(
            r.state[i].flatten(0, 1), snapshots[i % len(snapshots)].flatten(0, 2), r.A_log, r.a[i],
            r.dt_bias, q, k, v, r.b[i], self.out[i], r.slots, r.slots, *self.unused, v, k,
            r.A_log, r.A_log, True, stream,
        )  # fmt: skip
        return self.out[i]

    def _poison(self) -> None:
        self.out.fill_(torch.nan)

    def _judge(self, i: int, out: torch.Tensor) -> dict[str, float]:
        return {"o": over_relative(out, self.serial.exact(i).o, (1, 3), OUTPUT_LIMIT)}

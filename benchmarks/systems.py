"""What is timed: systems that run on the operands of a case, each with a judge; ours first."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.operands import Operands, split_rows
from benchmarks.reference import Exact, over_contract, over_relative, relative_error
from bolegen_runtime.contract import LIMIT

__all__ = ["Ours", "System"]

# of outputs: docs/theory.md, in place of the contract's limit; of their size, as drawn here
_TF32, _BF16_READOUT = 5e-4, 4e-3


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class System:
    """One contestant.

    ``run(i)`` runs layer i and gives its output; ``judge(i, output)`` gives error over limit by
    quantity, from the output and from whatever else the run left; ``prepare`` makes a judged
    run see the operands as drawn. ``layers`` is how many layers one run covers.
    """

    name: str
    run: Callable[[int], torch.Tensor]
    judge: Callable[[int, torch.Tensor], dict[str, float]]
    prepare: Callable[[], None] = _nothing
    layers: int = 1


class Ours:
    """A generated module on the operands of a case."""

    def __init__(self, module: ModuleType, r: Operands, exact: Callable[[int], Exact]) -> None:
        self.module, self.r, self.exact = module, r, exact
        self.limit = _TF32 if module.MODULE.contract == "tf32" else LIMIT
        batch, device = r.case.batch, r.x.device
        self.factors: Any = module.allocate(batch, r.sets, device)
        self.factors.check = False  # the operands are right by construction
        shape = r.case.shape
        self.out = r.x.new_empty(r.sets, batch, len(r.parents), shape.value_heads, shape.d_v)
        self.mixer = shape.mixer
        given = torch.tensor([r.parents] * batch, dtype=torch.int32, device=device)
        self.parents = given if r.case.runtime else None
        self.qkv = split_rows(r.case, r.rows)

    def verify(self) -> System:
        """Everything, the convolution included."""
        return System("ours.core", self.run_layer, self._judge, self._poison)

    def verify_qkv(self) -> System:
        """Factors and solve on convolved rows."""
        return System("ours.solve", self._verify_qkv, self._judge, self._poison)

    def commit(self) -> System:
        """All layers' states and windows in one launch; the factors are made by ``verify``."""
        r = self.r
        self.drawn = r.state.clone(), r.windows.clone()
        self.pools = r.state.clone(), r.windows.clone()
        for layer in range(r.sets):
            self.run_layer(layer)
        return System("ours.commit", self._commit, self._judge_commit, self._restore, r.sets)

    def run_layer(self, i: int) -> torch.Tensor:
        """Verify of one layer, the convolution included."""
        r = self.r
        weight, window, bias = (
            (r.weight, r.windows[i], r.bias) if self.mixer.convolved else (None, None, None)
        )
        a, b, *heads = self._gates(i)
        out: torch.Tensor = self.module.verify(
            r.x[i], a, b, weight, *heads, r.state[i], window, r.slots, self.factors, layer=i,
            conv_bias=bias, **self._options(i),
        )  # fmt: skip
        return out

    def _gates(self, i: int) -> list[torch.Tensor | None]:
        """a, b, A_log and dt_bias, None for those that the mixer does not read."""
        r, known = self.r, self.mixer.arguments
        given = {"a": r.a[i], "b": r.b[i], "A_log": r.A_log, "dt_bias": r.dt_bias}
        return [tensor if name in known else None for name, tensor in given.items()]

    def _options(self, i: int) -> dict[str, Any]:
        skip = {"D": self.r.D} if self.mixer.skip else {}
        return {"parents": self.parents, "out": self.out[i]} | skip

    def _verify_qkv(self, i: int) -> torch.Tensor:
        r = self.r
        out: torch.Tensor = self.module.verify_qkv(
            *(part[i] for part in self.qkv), *self._gates(i), r.state[i], r.slots, self.factors,
            layer=i, **self._options(i),
        )  # fmt: skip
        return out

    def _poison(self) -> None:
        """NaN in the output and in all memory of the round."""
        self.out.fill_(torch.nan)
        for tensor in vars(self.factors).values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def _judge(self, i: int, out: torch.Tensor) -> dict[str, float]:
        """The output, and the state and window that the factors commit."""
        exact = self.exact(i)
        if self.module.MODULE.readout == "bf16":
            found = {"o": over_relative(out, exact.o, (1, 3), _BF16_READOUT)}
        else:
            found = {"o": over_contract(out, exact.o, (1, 3), self.limit)}
        return found | self.judge_pools(i, *self._committed(i))

    def errors(self, i: int) -> dict[str, float]:
        """Relative errors of what layer i was last given and of the state that it commits."""
        exact, slots = self.exact(i), self.r.slots.long()
        state, _ = self._committed(i)
        return {
            "o": relative_error(self.out[i], exact.o, (1, 3)),
            "state": relative_error(state[i, slots], exact.state, (2, 3)),
        }

    def _committed(self, i: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of the pools up to layer i, after a commit of the accepted nodes."""
        r = self.r
        state = r.state[: i + 1].clone()
        windows = None if self.factors.convolved else r.windows[: i + 1].clone()
        self.module.commit(self.factors, state, windows, r.slots, r.last)
        return state, windows

    def judge_pools(
        self, i: int, state: torch.Tensor, windows: torch.Tensor | None
    ) -> dict[str, float]:
        """One layer of pools that the accepted nodes were committed to."""
        exact, slots = self.exact(i), self.r.slots.long()
        found = {"state": over_contract(state[i, slots], exact.state, (2, 3))}
        if windows is not None:
            same = torch.equal(windows[i, slots], exact.window)
            found["window"] = 0.0 if same else torch.inf
        return found

    def _commit(self, _: int) -> torch.Tensor:
        state, windows = self.pools
        self.module.commit(self.factors, state, windows, self.r.slots, self.r.last)
        return state

    def _restore(self) -> None:
        for pool, drawn in zip(self.pools, self.drawn, strict=True):
            pool.copy_(drawn)

    def _judge_commit(self, _: int, __: torch.Tensor) -> dict[str, float]:
        return self.judge_pools(self.r.sets - 1, *self.pools)

# mypy: allow-untyped-calls
"""Two rounds in a row on the same slots: the first is committed, the second verified."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.operands import DTYPE, Operands, draw_rows
from benchmarks.reference import Exact, committed_window, over_contract, solve_exactly
from benchmarks.systems import Ours, System

__all__ = ["OurRound", "draw_next", "solve_next"]


def draw_next(r: Operands) -> Operands:
    """The round after r: its windows are those that r commits, its states are still r's own."""
    gen = torch.Generator(r.x.device).manual_seed(1)
    windows, drawn = r.windows.clone(), []
    for i in range(r.sets):
        windows[i, r.slots.long()] = committed_window(r, i)
        drawn.append(draw_rows(gen, windows[i, r.slots.long()], (r.weight, r.bias), r.parents))

    def gates() -> torch.Tensor:
        return torch.randn(r.a.shape, generator=gen, device=r.x.device).to(DTYPE)

    return replace(
        r,
        x=torch.stack([x for x, _ in drawn]),
        rows=torch.stack([rows for _, rows in drawn]),
        a=gates(),
        b=gates(),
        windows=windows,
    )


def solve_next(after: Operands, exact: Callable[[int], Exact], layer: int) -> Exact:
    """One layer of the round after, from the exact state that the round before it commits."""
    state = after.state[layer : layer + 1].double()
    state[0, after.slots.long()] = exact(layer).state
    names = ("x", "rows", "a", "b", "windows")
    one = {name: getattr(after, name)[layer : layer + 1] for name in names}
    return solve_exactly(replace(after, state=state, **one), 0)


class OurRound:
    """Our module on two rounds of all layers; the first is verified ahead."""

    def __init__(self, mine: Ours) -> None:
        self.mine, self.r = mine, mine.r
        r = self.r
        self.after = draw_next(r)
        self.next = cache(partial(solve_next, self.after, mine.exact))
        self.pools = r.state.clone(), r.windows.clone()
        self.factors: Any = mine.module.allocate(r.case.batch, r.sets, r.x.device)
        self.factors.check = False
        for layer in range(r.sets):
            mine.run_layer(layer)

    def apart(self) -> System:
        """Commit of all layers, then verify of each."""
        return self._system("ours.apart", folded=False)

    def folded(self) -> System:
        """Verify of each layer, which commits as well."""
        return self._system("ours.folded", folded=True)

    def _system(self, name: str, *, folded: bool) -> System:
        run = partial(self._run, folded=folded)
        return System(name, run, self._judge, self._restore, self.r.sets)

    def _run(self, _: int, *, folded: bool) -> torch.Tensor:
        module, r, (state, windows) = self.mine.module, self.after, self.pools
        if not folded:
            module.commit(self.mine.factors, state, windows, r.slots, r.last)
        pending = (self.mine.factors, r.last) if folded else None
        for i in range(r.sets):
            module.verify(
                r.x[i], r.a[i], r.b[i], r.weight, r.A_log, r.dt_bias, state[i], windows[i],
                r.slots, self.factors, layer=i, parents=self.mine.parents, out=self.mine.out[i],
                pending=pending,
            )  # fmt: skip
        return self.mine.out[-1]

    def _restore(self) -> None:
        """Pools as drawn; NaN in the output and in what the second round leaves."""
        for pool, drawn in zip(self.pools, (self.r.state, self.r.windows), strict=True):
            pool.copy_(drawn)
        self.mine.out.fill_(torch.nan)
        for tensor in vars(self.factors).values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def _judge(self, _: int, out: torch.Tensor) -> dict[str, float]:
        layer = self.r.sets - 1
        found = {"o": over_contract(out, self.next(layer).o, (1, 3))}
        return found | self.mine.judge_pools(layer, *self.pools)

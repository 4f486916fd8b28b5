"""Thousands of rounds with random rejects, beside the recurrence run token after token."""
# mypy: disable-error-code="no-untyped-call"

import random
from types import ModuleType
from typing import Any

import torch

from benchmarks.replays import Draw
from bolegen_runtime import GraphPool, LayerWeights
from support.judge import LIMIT, Worst, same_bits
from support.rounds import Round, make_round

__all__ = ["play_rejects"]


class Serial:
    """States and windows of all slots, carried along accepted tokens one by one in one dtype."""

    def __init__(self, m: ModuleType, r: Round, dtype: torch.dtype) -> None:
        self.heads, self.dims = m.MODULE.heads, m.MODULE.dims
        self.dtype = dtype
        self.state = r.state.to(dtype, copy=True)
        self.window = r.conv_state.to(dtype, copy=True)
        self.weight, self.rate, self.bias = (
            t.to(dtype) for t in (r.conv_weight, r.A_log.exp(), r.dt_bias)
        )

    def accept(self, paths: torch.Tensor, slots: torch.Tensor, r: Round) -> None:
        """paths [B, D]: accepted nodes in order, -1 behind; slots [B], all different."""
        x, a, b = (t.to(self.dtype) for t in (r.x, r.a, r.b))
        for nodes in paths.unbind(1):
            rows = (nodes >= 0).nonzero()[:, 0]
            at, slot = nodes[rows], slots[rows]
            self._step(x[:, rows, at], a[:, rows, at], b[:, rows, at], slot)

    def _step(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slot: torch.Tensor) -> None:
        """One token: x [L, R, C], a and b [L, R, Hv], slot [R]."""
        (hk, hv), (dk, dv) = self.heads, self.dims
        taps = torch.cat([self.window[:, slot], x[..., None]], -1)  # [L, R, C, W]
        self.window[:, slot] = taps[..., 1:]
        mixed = torch.nn.functional.silu((taps * self.weight[:, None]).sum(-1))
        k = mixed[..., hk * dk : 2 * hk * dk].unflatten(-1, (hk, dk))
        k = k / (k * k).sum(-1, keepdim=True).add(1e-6).sqrt()
        k = k.repeat_interleave(hv // hk, 2)  # [L, R, Hv, d_k]
        v = mixed[..., 2 * hk * dk :].unflatten(-1, (hv, dv))
        decay = a + self.bias[:, None]
        decay = torch.exp(-self.rate[:, None] * torch.nn.functional.softplus(decay))
        state = self.state[:, slot] * decay[..., None, None]
        u = torch.sigmoid(b)[..., None] * (v - (state * k[..., None, :]).sum(-1))
        self.state[:, slot] = state + u[..., None] * k[..., None, :]


def play_rejects(
    m: ModuleType, *, rounds: int, rows: int = 8, slots: int = 20, seed: int = 1
) -> dict[str, Any]:
    """Play rounds of graph replays; every hundredth the states are judged.

    A state errs at most 1.5 times as much as the same recurrence in float32, or as the contract
    allows of one commit; a window not at all. Raises AssertionError otherwise.
    """
    numbers, layers = random.Random(seed), 2
    torch.manual_seed(seed)
    trees = [[-1] + [0] * (m.MODULE.nodes - 1)] * rows
    r = make_round(
        m, batch=rows, layers=layers, slots=slots, trees=trees, device="cuda",
        log_rate=(-7.0, 0.0),
    )  # fmt: skip
    weights = [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)]
    pool = GraphPool(m, weights, r.state, r.conv_state, batches=(rows,))
    pool.capture()
    exact, honest = Serial(m, r, torch.float64), Serial(m, r, torch.float32)
    worst, accepted = Worst(), 0
    for number in range(rounds):
        draw = Draw.make(m, numbers, rows, slots)
        n = len(draw.trees[0])
        for tensor in (r.x, r.a, r.b):
            tensor.normal_()
        pool.verify(r.x[:, :, :n], r.a[:, :, :n], r.b[:, :, :n], draw.slots, **draw.options)
        pool.commit(torch.tensor(draw.last, device="cuda"))
        found = [_path(*of) for of in zip(draw.trees, draw.live, draw.last, strict=True)]
        accepted += sum(map(len, found))
        width = max(map(len, found))
        paths = torch.tensor([p + [-1] * (width - len(p)) for p in found], device="cuda")
        for serial in (exact, honest):
            serial.accept(paths.long(), draw.slots, r)
        if number % 100 == 99 or number == rounds - 1:
            worst |= _judge(r, exact, honest)
    worst.assert_within()
    return {
        "module": m.MODULE.name,
        "rounds": rounds,
        "rows of a round": rows,
        "tokens accepted": accepted,
        "worst error over its limit": worst.ratios,
    }


def _path(tree: list[int], live: list[bool], last: int) -> list[int]:
    """Nodes from the root to the accepted one; none where nothing is accepted."""
    if not 0 <= last < len(tree) or not live[last]:
        return []
    found = [last]
    while found[-1] > 0:
        found.append(tree[found[-1]])
    return found[::-1]


def _judge(r: Round, exact: Serial, honest: Serial) -> Worst:
    """Every head of every slot."""
    assert same_bits(r.conv_state.double(), exact.window), "a window differs"
    size = exact.state.flatten(3).norm(dim=-1)
    error = (r.state.double() - exact.state).flatten(3).norm(dim=-1)
    by_float32 = (honest.state.double() - exact.state).flatten(3).norm(dim=-1)
    limit = torch.maximum(1.5 * by_float32, LIMIT * size)
    worst = Worst()
    worst.note("state", float((error / limit).max()), 1.0)
    return worst

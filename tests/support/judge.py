"""What the exactness contract allows: outputs, deltas, states and windows beside the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from bolegen import oracle
from bolegen.interpret import Operands, decay_products, true_mask
from bolegen.ir import Mixer, find_mixer
from bolegen.oracle import Array

__all__ = [
    "LIMIT",
    "Pool",
    "Worst",
    "check_commit",
    "check_verify",
    "numpy64",
    "operands",
    "rounding",
    "same_bits",
]

LIMIT = 5e-6  # docs/theory.md, in norms over a head
READOUT = 8e-3  # two roundings to bf16, of |Y| |R|

Pool = tuple[torch.Tensor, torch.Tensor]  # states and convolution windows of all layers


def numpy64(tensor: torch.Tensor) -> Array:
    """A tensor as float64."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = as_integers[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


@dataclass(frozen=True)
class Worst:
    """Largest error over its limit by quantity: o, u, conv, state, window; at most 1 passes."""

    ratios: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, error: float, limit: float) -> None:
        """Remember error / limit where it is the largest so far; NaN is infinitely large."""
        ratio = error / limit if limit > 0 else (0.0 if error == 0 else np.inf)
        self.ratios[name] = max(self.ratios.get(name, 0.0), np.inf if np.isnan(ratio) else ratio)

    def __or__(self, other: "Worst") -> "Worst":
        both = Worst(dict(self.ratios))
        for name, ratio in other.ratios.items():
            both.note(name, ratio, 1.0)
        return both

    def __str__(self) -> str:
        return ", ".join(f"{name} {ratio:.3f}" for name, ratio in sorted(self.ratios.items()))

    def assert_within(self) -> None:
        """Fail where any error is over its limit, or nothing was measured."""
        assert self.ratios, "nothing was measured"
        assert max(self.ratios.values()) <= 1.0, f"error over limit: {self}"


def rounding(exact: Array, dtype: torch.dtype) -> float:
    """Norm of what one rounding of `exact` to `dtype` costs, times 1.1."""
    once = torch.from_numpy(exact).to(dtype).to(torch.float64).numpy()
    return 1.1 * float(np.linalg.norm(once - exact))


def operands(
    m: ModuleType, r: Any, qkv: torch.Tensor, layer: int, row: int
) -> tuple[Array, Array, Array, Array, Array]:
    """q, k, v, g, beta of one row for the oracle, from the rows that the kernel itself rounded."""
    hk, hv = m.MODULE.heads
    mixer, d_k = find_mixer(m.MODULE.mixer), m.MODULE.dims[0]
    rows = numpy64(qkv[row, : r.x.shape[2]])
    q, k, v = oracle.split_rows(rows, key_heads=hk, value_heads=hv, d_k=d_k, mixer=mixer)
    raw = r.a[layer, row], r.b[layer, row], r.A_log[layer], r.dt_bias[layer]
    g, beta = oracle.gates(*(numpy64(each) for each in raw), mixer=mixer, nodes=len(rows))
    return *oracle.normalise(q, k, mixer), v, g, beta


def check_verify(m: ModuleType, r: Any, out: torch.Tensor, factors: Any, layer: int = 0) -> Worst:
    """Outputs (and U where it is stored) of one layer against the oracle, head by head."""
    worst = Worst()
    for row in range(r.x.shape[1]):
        slot = int(r.slots[row])
        if slot < 0:
            assert torch.count_nonzero(out[row]) == 0
            continue
        if not factors.convolved:
            _check_conv(r, factors, layer, row, worst)
        live = None if r.live is None else r.live[row].cpu().numpy()
        known = operands(m, r, factors.convolved_rows(layer), layer, row)
        state = numpy64(r.state[layer, slot])
        mixer, skip = find_mixer(m.MODULE.mixer), None if r.D is None else numpy64(r.D[layer])
        want = oracle.recurrence(r.trees[row], *known, state, live=live, mixer=mixer, D=skip)
        got = numpy64(out[row])
        if live is not None:
            assert np.count_nonzero(got[~live]) == 0
        for head in range(got.shape[1]):
            exact = want.o[:, head]
            limit = LIMIT * float(np.linalg.norm(exact))
            if m.MODULE.dtype != torch.float32:
                limit = max(rounding(exact, m.MODULE.dtype), limit)
            if m.MODULE.readout == "bf16":
                each = _measure_readout(r.trees[row], known, state, head, live, mixer)
                limit += READOUT * each
            worst.note("o", float(np.linalg.norm(got[:, head] - exact)), limit)
        if factors.u is not None:
            parts = (*known[1:], state)
            _check_u(m, r, numpy64(factors.u[layer, row]), want.u, parts, row, worst)
    return worst


def _measure_readout(
    parents: Sequence[int],
    known: tuple[Array, ...],
    state: Array,
    head: int,
    live: Array | None,
    mixer: Mixer,
) -> float:
    """Norm of |Y| |R| of one head, Y = C (I + G)^-1: what one rounding of each costs at most."""
    if live is not None:  # what is dead may hold anything
        known = tuple(part.copy() for part in known)
        for part in known:
            part[np.logical_not(live)] = 0.0
    q, k, v, g, beta = known
    key = head // (v.shape[1] // k.shape[1])
    one = Operands.from_arrays(
        q[:, key], k[:, key], v[:, head], np.exp(g[:, head]), beta[:, head], state[head], parents
    )
    ratio, reach = decay_products(parents, one, mixer)
    mask, write, own = true_mask(parents), one.beta[:, None], np.eye(len(parents))
    inverted = own + mixer.delta * np.where(mask, ratio * one.kk * write, 0)
    y = np.linalg.solve(inverted.T, np.where(mask | (own > 0), ratio * one.qk, 0).T).T
    each = np.abs(y) @ np.abs(write * (one.v - mixer.delta * reach * one.ks))
    return float(np.linalg.norm(each if live is None else each[live]))


def _check_conv(r: Any, factors: Any, layer: int, row: int, worst: Worst) -> None:
    """The convolution by itself, to one unit in the last place of the activations' dtype."""
    raw = numpy64(r.x[layer, row])
    window = numpy64(r.conv_state[layer, int(r.slots[row])])
    weight = numpy64(r.conv_weight[layer])
    live = None if r.live is None else r.live[row].cpu().numpy()
    bias = None if r.conv_bias is None else numpy64(r.conv_bias[layer])
    want = oracle.convolve(r.trees[row], raw, window, weight, bias, live=live)
    got = numpy64(factors.convolved_rows(layer)[row, : len(want)])
    # cancelling sums carry the float32 error of their terms, not of their result
    alive = slice(None) if live is None else live
    largest = max(np.nanmax(np.abs(raw[alive]), initial=1.0), np.max(np.abs(window)))
    largest = max(largest * np.max(np.abs(weight)), 0.0 if bias is None else np.max(np.abs(bias)))
    unit = np.abs(want) * torch.finfo(r.x.dtype).eps + 2e-6 * max(1.0, largest)
    worst.note("conv", float(np.max(np.abs(got - want) / unit)), 1.0)


def _check_u(
    m: ModuleType,
    r: Any,
    got: Array,
    want: Array,
    known: tuple[Array, ...],
    row: int,
    worst: Worst,
) -> None:
    """|dU| <= 5e-6 (|D_beta V| + |D_beta D_P K S|) over a head: U itself may cancel."""
    k, v, g, beta, state = known
    live = np.ones(len(v), bool) if r.live is None else r.live[row].cpu().numpy()
    ratio, mixer = v.shape[1] // k.shape[1], find_mixer(m.MODULE.mixer)
    sums = np.zeros_like(g)
    for node in np.flatnonzero(live):
        parent = r.trees[row][node]
        sums[node] = g[node] + (sums[parent] if parent >= 0 else 0)
    for head in range(v.shape[1]):
        write = beta[:, head, None]
        reach = np.exp(sums[:, head].reshape(len(sums), -1))
        part = mixer.delta * write * ((reach * k[:, head // ratio]) @ state[head].T)
        parts = (write * v[:, head])[live], part[live]
        limit = LIMIT * float(sum(np.linalg.norm(each) for each in parts))
        error = (got[: len(want), head] - want[:, head])[live]
        worst.note("u", float(np.linalg.norm(error)), limit)


def check_commit(
    m: ModuleType,
    r: Any,
    factors: Any,
    before: Pool,
    after: Pool,
    last: Sequence[int],
    layer: int = 0,
    *,
    tracks: Sequence[tuple[int, int]] = (),
    qkv: torch.Tensor | None = None,
) -> Worst:
    """Committed states and windows of one layer against the oracle; other slots untouched.

    ``tracks`` holds a slot and a node for each row. ``qkv`` is what verify left in
    factors.convolved_rows(layer), by default what is there now.
    """
    worst = Worst()
    expected: dict[int, tuple[int, int]] = {}
    for row, (slot, node) in enumerate(tracks):
        if int(r.slots[row]) < 0:
            continue
        if slot >= 0 and node >= 0 and node in _accepted(r, row, last[row]):
            expected[slot] = row, node
    for row, node in enumerate(last):
        if int(r.slots[row]) >= 0 and _accepted(r, row, node):
            expected[int(r.slots[row])] = row, node
    rows = factors.convolved_rows(layer) if qkv is None else qkv
    for slot, (row, node) in expected.items():
        _check_slot(m, r, rows, (before, after), (layer, slot, row, node), worst)
        if factors.convolved:
            continue
        window = numpy64(before[1][layer, int(r.slots[row])])
        want = oracle.committed_window(r.trees[row], node, numpy64(r.x[layer, row]), window)
        error = np.count_nonzero(numpy64(after[1][layer, slot]) != want)
        worst.note("window", float(error), 0.0)
    windows = set() if factors.convolved else set(expected)
    for part, written in zip((0, 1), (set(expected), windows), strict=True):
        for slot in set(range(before[0].shape[1])) - written:
            assert same_bits(after[part][layer, slot], before[part][layer, slot])
    return worst


def _accepted(r: Any, row: int, node: int) -> list[int]:
    """The path to the accepted node, empty where nothing is committed."""
    live = None if r.live is None else r.live[row].cpu().numpy()
    return oracle.find_path(r.trees[row], node, live=live)


def _check_slot(
    m: ModuleType,
    r: Any,
    qkv: torch.Tensor,
    pools: tuple[Pool, Pool],
    where: tuple[int, int, int, int],
    worst: Worst,
) -> None:
    """One committed state."""
    before, after = pools
    layer, slot, row, node = where
    live = None if r.live is None else r.live[row].cpu().numpy()
    _, k, v, g, beta = operands(m, r, qkv, layer, row)
    state = numpy64(before[0][layer, int(r.slots[row])])
    mixer = find_mixer(m.MODULE.mixer)
    want = oracle.committed_state(r.trees[row], node, k, v, g, beta, state, live=live, mixer=mixer)
    got = numpy64(after[0][layer, slot])
    for head in range(len(want)):
        limit = LIMIT * float(np.linalg.norm(want[head]))
        if m.MODULE.state_dtype != torch.float32:
            limit = max(rounding(want[head], m.MODULE.state_dtype), limit)
        worst.note("state", float(np.linalg.norm(got[head] - want[head])), limit)

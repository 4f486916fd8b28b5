"""The exactness contract of docs/theory.md, measured on one layer of a round against reference.py.

Reads results back to the host, so it waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from bolegen_runtime.arguments import expect_module
from bolegen_runtime.reference import Operands, Tree, advance, convolve, recur, shift

__all__ = [
    "LIMIT",
    "Finding",
    "LayerRound",
    "Slot",
    "measure_commit",
    "measure_verify",
    "read_trees",
    "refuse_unbounded",
]

LIMIT = 5e-6  # in norms over a head

Tensor = torch.Tensor
Slot = Sequence[Tensor]  # state [Hv, d_v, d_k] and, where it is committed, window [C, W-1]


@dataclass(frozen=True)
class LayerRound:
    """One layer's arguments of verify, and the convolved rows [B, n, C] that it went on with.

    ``x`` and the convolution's weights are None after verify_qkv, which is given those rows.
    """

    layer: int
    x: Tensor | None
    rows: Tensor
    a: Tensor
    b: Tensor
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    slots: Sequence[int]
    trees: Sequence[Tree]

    def operands(self, m: ModuleType, row: int) -> Operands:
        """One request's, from the rows that the kernel itself rounded."""
        gates = self.a[row], self.b[row], self.A_log, self.dt_bias
        return Operands.of(self.rows[row], gates, m.MODULE.heads, m.MODULE.dims[0])


@dataclass(frozen=True)
class Finding:
    """The largest error over its limit of one quantity: rows, out, state or window of a request.

    ``head`` and ``node`` say where, None for all of them.
    """

    what: str
    layer: int
    row: int
    slot: int
    error: float
    limit: float
    head: int | None = None
    node: int | None = None

    @property
    def ratio(self) -> float:
        """Error over limit; at most 1 is within the contract, NaN is infinitely large."""
        ratio = self.error / self.limit if self.limit else (float("inf") if self.error else 0.0)
        return float("inf") if ratio != ratio else ratio

    def __str__(self) -> str:
        at = f"layer {self.layer}, request {self.row} (slot {self.slot})"
        at += "" if self.head is None else f", head {self.head}"
        at += "" if self.node is None else f", node {self.node}"
        return f"{self.what}: {at}: error {self.error:.3g} over limit {self.limit:.3g}"


def refuse_unbounded(m: ModuleType) -> None:
    """Raises ValueError for a module whose results keep to other bounds, or to none."""
    expect_module(m)
    known = m.MODULE.mixer, m.MODULE.contract, m.MODULE.readout
    if known != ("gdn", "fp32", "split"):
        raise ValueError(
            "module: expected mixer gdn, contract fp32 and readout split, got "
            f"{', '.join(known)}, whose results are not checked"
        )


def read_trees(
    m: ModuleType, slots: Sequence[int], nodes: int, parents: Tensor | None, live: Tensor | None
) -> list[Tree]:
    """Every request's tree on the host; nodes that verify takes for dead are dead in it."""
    rows = len(slots)
    given = [list(m.MODULE.parents)] * rows if parents is None else parents.tolist()
    alive = [[True] * nodes] * rows if live is None else live.tolist()
    return [_link(m.MODULE.depth, *of) for of in zip(slots, given, alive, strict=True)]


def _link(depth: int, slot: int, parents: list[int], alive: list[bool]) -> Tree:
    levels: list[int | None] = []
    for node, parent in enumerate(parents):
        above = -1 if node == 0 else levels[parent] if 0 <= parent < node else None
        linked = slot >= 0 and alive[node] and above is not None and above < depth
        levels.append(above + 1 if linked and above is not None else None)
    return Tree(parents, [level is not None for level in levels])


def measure_verify(
    m: ModuleType, r: LayerRound, state: Tensor, conv_state: Tensor | None, out: Tensor
) -> list[Finding]:
    """Convolution and outputs of every request, from the layer's pools as verify read them."""
    found = []
    for row, (slot, tree) in enumerate(zip(r.slots, r.trees, strict=True)):
        dead = [node for node, alive in enumerate(tree.live) if not alive]
        where = ("out", r.layer, row, slot)
        wrong = out[row, dead].ne(0).flatten(1).any(1).tolist()
        found += [
            Finding(*where, float("inf"), 0.0, node=node)
            for node, is_wrong in zip(dead, wrong, strict=True)
            if is_wrong
        ]
        if slot < 0 or not tree.nodes:
            continue
        if r.x is not None and conv_state is not None:
            found.append(_measure_rows(r, row, conv_state[slot]))
        want = recur(tree, r.operands(m, row), state[slot])[tree.nodes]
        error = out[row, tree.nodes].double() - want
        found.append(_measure_heads(where, error, want, m.MODULE.dtype, tree.nodes))
    return found


def measure_commit(
    m: ModuleType, r: LayerRound, row: int, last: int, slot: int, pools: tuple[Slot, Slot]
) -> list[Finding]:
    """One slot after the path of request ``row`` to node ``last``; the pools before and after."""
    before, after = pools
    path = r.trees[row].path(last)
    want = advance(path, r.operands(m, row), before[0])
    where = ("state", r.layer, row, slot)
    found = [_measure_heads(where, (after[0] - want)[None], want[None], m.MODULE.state_dtype)]
    if r.x is not None and len(before) > 1:
        differ = shift(path, r.x[row], before[1]).ne(after[1]).sum()
        found.append(Finding("window", r.layer, row, slot, float(differ), 0.0))
    return found


def _measure_rows(r: LayerRound, row: int, window: Tensor) -> Finding:
    """The convolution by itself, to one unit in the last place of the activations' dtype."""
    assert r.x is not None
    assert r.conv_weight is not None
    tree, x = r.trees[row], r.x[row]
    want = convolve(tree, x, window, r.conv_weight, r.conv_bias)[tree.nodes]
    # cancelling sums carry the float32 error of their terms, not of their result
    largest = torch.maximum(x[tree.nodes].abs().amax(), window.abs().amax())
    largest = (largest * r.conv_weight.abs().amax()).double().clamp(min=1)
    if r.conv_bias is not None:
        largest = torch.maximum(largest, r.conv_bias.abs().amax().double())
    unit = want.abs() * torch.finfo(x.dtype).eps + 2e-6 * largest
    ratios = (r.rows[row, tree.nodes].double() - want).abs() / unit
    ratios = ratios.nan_to_num(nan=float("inf")).amax(1)
    worst, at = ratios.max(0)
    return Finding("rows", r.layer, row, r.slots[row], float(worst), 1.0, node=tree.nodes[int(at)])


def _measure_heads(
    where: tuple[str, int, int, int],
    error: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    nodes: Sequence[int] = (),
) -> Finding:
    """The worst head of error and want [n, Hv, ...]: 5e-6 of its norm, or 1.1 roundings."""
    limits = LIMIT * _norms(want)
    if dtype != torch.float32:
        limits = torch.maximum(limits, 1.1 * _norms(want.to(dtype).double() - want))
    errors = _norms(error)
    ratios = torch.where(errors == 0, 0.0, errors / limits).nan_to_num(nan=float("inf"))
    head = int(ratios.argmax())
    node = None
    if nodes:
        by_node = torch.linalg.vector_norm(error[:, head].flatten(1), dim=1)
        node = nodes[int(by_node.nan_to_num(nan=float("inf")).argmax())]
    return Finding(*where, float(errors[head]), float(limits[head]), head, node)


def _norms(x: Tensor) -> Tensor:
    """A norm for each head of [n, Hv, ...]."""
    norms: Tensor = torch.linalg.vector_norm(x.transpose(0, 1).flatten(1), dim=1)
    return norms

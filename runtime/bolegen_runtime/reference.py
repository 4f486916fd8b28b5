"""The recurrence by definition, in float64 on the tensors' own device: what results are held to.

One request a call. Letters as in docs/theory.md: T nodes, Hk and Hv key and value heads, d_k and
d_v dims, C channels of a row q|k|v, W the convolution's width. A dead node is never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Operands", "Tree", "advance", "convolve", "recur", "shift"]

NORM_EPS = 1e-6  # inside the root, not beside it
SOFTPLUS_LINEAR = 20.0  # softplus(x) is x above this
CHUNK = 32  # states of so many nodes at once

Tensor = torch.Tensor


@dataclass(frozen=True)
class Tree:
    """One request's topology on the host: each node's parent, -1 for node 0, and who is live."""

    parents: Sequence[int]
    live: Sequence[bool]

    @property
    def nodes(self) -> list[int]:
        """Live nodes."""
        return [node for node, alive in enumerate(self.live) if alive]

    def path(self, last: int) -> list[int]:
        """Nodes from the root to ``last``; empty for a dead node and one that is not there."""
        if not 0 <= last < len(self.live) or not self.live[last]:
            return []
        path = [last]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def levels(self) -> Iterator[list[int]]:
        """Live nodes by their distance from the root."""
        level: list[int] = [node for node in self.nodes if node == 0]
        while level:
            yield level
            above = set(level)
            level = [node for node in self.nodes if node and self.parents[node] in above]


@dataclass(frozen=True)
class Operands:
    """q, k [T, Hv, d_k] after the norm, v [T, Hv, d_v], decay and beta [T, Hv], all float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def of(
        cls,
        rows: Tensor,
        gates: tuple[Tensor, Tensor, Tensor, Tensor],
        heads: tuple[int, int],
        d_k: int,
    ) -> Operands:
        """From convolved rows q|k|v [T, C] and gates (a [T, Hv], b [T, Hv], A_log, dt_bias)."""
        key_heads, value_heads = heads
        wide = key_heads * d_k
        q = _unit(_spread(rows[:, :wide].double(), heads))
        k = _unit(_spread(rows[:, wide : 2 * wide].double(), heads))
        v = rows[:, 2 * wide :].double().reshape(len(rows), value_heads, -1)
        a, b, rate, bias = (gate.double() for gate in gates)
        step = a + bias
        softplus = torch.where(
            step > SOFTPLUS_LINEAR, step, step.clamp(max=SOFTPLUS_LINEAR).exp().log1p()
        )
        # far below zero softplus(x) is e^x, which may vanish where exp(A_log) overflows
        log_decay = torch.where(step < -40, -(rate + step).exp(), -rate.exp() * softplus)
        return cls(q * d_k**-0.5, k, v, log_decay.exp(), b.sigmoid())

    def step(self, state: Tensor, at: list[int]) -> Tensor:
        """States [n, Hv, d_v, d_k] of the nodes ``at``, from their parents' states."""
        state = state * self.decay[at, :, None, None]
        u = self.beta[at, :, None] * (self.v[at] - _apply(state, self.k[at]))
        return state + u[..., None] * self.k[at, :, None, :]


def recur(tree: Tree, given: Operands, state: Tensor) -> Tensor:
    """Outputs [T, Hv, d_v] of every node from its parent's state; dead nodes give zeros.

    ``state`` [Hv, d_v, d_k], the pool's layout: S transposed.
    """
    out = torch.zeros_like(given.v)
    inner = set(tree.parents[node] for node in tree.nodes)
    above = {-1: state.double()}
    for level in tree.levels():
        found: dict[int, Tensor] = {}
        for start in range(0, len(level), CHUNK):
            at = level[start : start + CHUNK]
            states = given.step(torch.stack([above[tree.parents[node]] for node in at]), at)
            out[at] = _apply(states, given.q[at])
            found |= {node: states[i] for i, node in enumerate(at) if node in inner}
        above = found
    return out


def advance(path: Sequence[int], given: Operands, state: Tensor) -> Tensor:
    """The state [Hv, d_v, d_k] after the nodes of ``path``, one after another."""
    state = state.double()[None]
    for node in path:
        state = given.step(state, [node])
    return state[0]


def convolve(
    tree: Tree, x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Causal depthwise convolution along each node's own path, then SiLU: rows [T, C].

    ``x`` [T, C] raw rows, ``window`` [C, W-1] oldest first, ``weight`` [C, W], ``bias`` [C].
    """
    width = weight.shape[1]
    out = torch.zeros_like(x, dtype=torch.float64)
    for node in tree.nodes:
        tail = shift(tree.path(node), x, window.double(), width)
        total = (tail * weight.double()).sum(1) + (0 if bias is None else bias.double())
        out[node] = total * total.sigmoid()
    return out


def shift(path: Sequence[int], x: Tensor, window: Tensor, width: int | None = None) -> Tensor:
    """The last ``width`` rows of window and path, [C, width]: by default the next window."""
    width = window.shape[1] if width is None else width
    new = x[list(path[-width:])].to(window.dtype).T
    return torch.cat([window[:, window.shape[1] - (width - new.shape[1]) :], new], 1)


def _spread(part: Tensor, heads: tuple[int, int]) -> Tensor:
    """Key heads' rows [T, Hk d_k] for every value head: [T, Hv, d_k]."""
    split = part.reshape(len(part), heads[0], -1)
    return split.repeat_interleave(heads[1] // heads[0], 1)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def _apply(state: Tensor, row: Tensor) -> Tensor:
    """S^T x for every head: [n, Hv, d_v, d_k], [n, Hv, d_k] -> [n, Hv, d_v]."""
    return (state @ row[..., None])[..., 0]

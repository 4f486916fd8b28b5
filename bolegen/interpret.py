"""Run a plan as the emitted kernels do, in whatever numbers the operands are made of.

One head at a time. The plan says which node sees which, in which blocks and with how many
products; only the decay between a node and its ancestor comes from the tree itself. So a
plan with a wrong mask, a lost column or a power too few gives wrong numbers here, exactly as
its kernel would. Tests run it on float64, proofs on polynomials and on residues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bolegen.errors import TreeError
from bolegen.ir import GDN, Mixer, TreePlan, TreeTemplate

__all__ = ["Matrix", "Operands", "ancestor_mask", "decay_products", "interpret", "true_mask"]

Matrix = NDArray[Any]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Operands:
    """What the solve of one head reads, T nodes and d_v value channels.

    ``kk`` [T, T] k_i.k_j, ``qk`` [T, T] q_i.k_j, ``ks`` and ``qs`` [T, d_v] rows k_i^T S and
    q_i^T S, ``v`` [T, d_v], ``decay`` [T] e^g_i, ``beta`` [T] write gates. Entries are
    float64, any exact numbers in arrays of objects (fractions, polynomials), or, where
    ``modulus`` is a prime below 2^26, int64 residues of it: sums of 512 products stay exact.
    """

    kk: Matrix
    qk: Matrix
    ks: Matrix
    qs: Matrix
    v: Matrix
    decay: Matrix
    beta: Matrix
    modulus: int | None = None

    @classmethod
    def from_arrays(
        cls,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        gamma: ArrayLike,
        beta: ArrayLike,
        state: ArrayLike,
        parents: Sequence[int] = (),
    ) -> "Operands":
        """Float64 operands of one head: q, k [T, d_k] after the norm, v [T, d_v], gamma and
        beta [T], ``state`` [d_v, d_k] as the pool stores it. Where gamma is [T, d_k], products
        of keys and states hold the decays of the path between, by ``parents``."""  # fmt: skip
        q, k, v, gamma, beta, state = (
            np.asarray(x, dtype=np.float64) for x in (q, k, v, gamma, beta, state)
        )
        if gamma.ndim == 2:
            ratio, reach = _channel_products(parents, gamma)
            kk, qk = (np.einsum("ic,ijc,jc->ij", x, ratio, k) for x in (k, q))
            return cls(kk, qk, (k * reach) @ state.T, (q * reach) @ state.T, v, beta * 0 + 1, beta)
        return cls(k @ k.T, q @ k.T, k @ state.T, q @ state.T, v, gamma, beta)

    def times(self, a: Matrix, b: Matrix) -> Matrix:
        """Product entry by entry, with numpy's broadcasting."""
        return self.reduce(a * b)

    def reduce(self, x: Matrix) -> Matrix:
        """The residues of ``x`` where there is a modulus, else ``x`` itself."""
        return x if self.modulus is None else x % self.modulus

    def dot(self, a: Matrix, x: Matrix) -> Matrix:
        """Matrix product of ``a`` [m, n] and ``x`` [n, d_v]."""
        if a.dtype != object:
            return self.reduce(a @ x)
        total: Matrix = np.zeros((len(a), x.shape[1]), dtype=object)
        for i, j in zip(*np.nonzero(a), strict=True):
            total[i] = total[i] + x[j] * a[i, j]
        return total


def interpret(
    plan: TreePlan, operands: Operands, parents: Sequence[int] | None = None
) -> tuple[Matrix, Matrix]:
    """U and O, both [T, d_v], as the kernels of ``plan`` compute them.

    ``parents`` gives the topology of a runtime plan, at most ``plan.tree.nodes`` nodes; a
    static plan has its own. (I + G)^-1 is folded into what multiplies R once a head:
    O = D_P Q S + Y R with Y = C (I + G)^-1, and U = R + Z R with Z = -G (I + G)^-1.
    Only nodes of blocks with columns have them in Y and Z; another's own R enters by its q.k.
    Raises TreeError where a tree at run time is missing, too large or too deep.
    """
    known, mixer = _topology(plan, parents), plan.spec.mixer
    times, beta = operands.times, operands.beta[:, None]
    mask = true_mask(known) if plan.spans is None else ancestor_mask(plan)
    ratio, reach = decay_products(known, operands, mixer)
    g, r = np.zeros_like(operands.kk), times(beta, operands.v)
    if mixer.delta:
        g = np.where(mask, times(times(ratio, operands.kk), beta), 0)
        r = times(beta, operands.v - times(reach, operands.ks))
    c = np.where(mask, times(ratio, operands.qk), 0)

    blocks = [[n for n in block.nodes if 0 <= n < len(known)] for block in plan.columns]
    columns = [node for nodes in blocks for node in nodes]
    own = np.diagonal(operands.qk)[:, None]
    leaves = np.ones_like(own)
    leaves[columns] = 0
    c = operands.reduce(c - times(times(leaves, own), g))
    c[columns, columns] = own[columns, 0]
    y = _substitute(plan, operands, g, c, blocks)
    z = _substitute(plan, operands, g, operands.reduce(-g), blocks)
    u = operands.reduce(r + operands.dot(z[:, columns], r[columns]))
    o = times(reach, operands.qs) + operands.dot(y[:, columns], r[columns])
    o = operands.reduce(o + times(times(leaves, own), r))
    # nothing is written for a node that has no position
    lost = sorted(set(range(len(known))) - {n for block in plan.blocks for n in block.nodes})
    u[lost], o[lost] = 0, 0
    return u, o


def _substitute(
    plan: TreePlan, operands: Operands, g: Matrix, source: Matrix, blocks: list[list[int]]
) -> Matrix:
    """``source`` (I + G)^-1, column block by column block, last first (docs/theory.md, fact 1).

    A block is the source less what later blocks take from it, times the inverse of its own
    diagonal block: that is nested, X <- I - G X, where blocks are inverted together, else it is
    Y <- base - Y G on all rows.
    """
    solved = np.zeros_like(source)
    for index in reversed(range(len(blocks))):
        block, nodes = plan.columns[index], blocks[index]
        later = [node for after in blocks[index + 1 :] for node in after]
        base = source[:, nodes] - operands.dot(solved[:, later], g[np.ix_(later, nodes)])
        inside = g[np.ix_(nodes, nodes)]
        x = base = operands.reduce(base)
        if block.inverted:
            inverse = identity = np.eye(len(nodes), dtype=np.int64).astype(g.dtype)
            for _ in range(block.steps):
                inverse = operands.reduce(identity - operands.dot(inside, inverse))
            x = operands.dot(base, inverse)
        else:
            for _ in range(block.steps):
                x = operands.reduce(base - operands.dot(x, inside))
        solved[:, nodes] = x
    return solved


def ancestor_mask(plan: TreePlan) -> Mask:
    """[T, T] bool of a static plan: does node i see node j, by the plan's preorder spans."""
    assert plan.spans is not None
    first, last = np.array(plan.spans).T
    mask: Mask = (first[None, :] < first[:, None]) & (first[:, None] <= last[None, :])
    return mask


def true_mask(parents: Sequence[int]) -> Mask:
    """[T, T] bool: is node j a strict ancestor of node i, by the parents themselves."""
    mask = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
            mask[node, parent] = True
    return mask


def decay_products(
    parents: Sequence[int], operands: Operands, mixer: Mixer = GDN
) -> tuple[Matrix, Matrix]:
    """Products of decays: between i and its ancestor j [T, T], and from the root [T, 1].

    Taken along the path below j down to i, never as a quotient: a decay may be 0
    (docs/theory.md, fact 2). Between nodes that are no ancestors the entry is a product along the
    path of i, not 0, so that a wrong mask shows.
    """
    nodes = len(parents)
    ratio = np.full((nodes, nodes), 1, dtype=operands.decay.dtype)
    reach = np.full((nodes, 1), 1, dtype=operands.decay.dtype)
    if not mixer.scales_state:
        return ratio, reach
    for node, parent in enumerate(parents):
        decay = operands.decay[node : node + 1]
        reach[node] = decay if parent < 0 else operands.times(reach[parent], decay)
        if parent >= 0:
            ratio[node] = operands.times(ratio[parent], decay)
            ratio[node, node] = 1
    return ratio, reach


def _channel_products(parents: Sequence[int], gamma: Matrix) -> tuple[Matrix, Matrix]:
    """`decay_products` by key channel: [T, T, d_k] and [T, d_k]."""
    nodes = len(parents)
    ratio, reach = np.ones((nodes, nodes, gamma.shape[1])), np.ones_like(gamma)
    for node, parent in enumerate(parents):
        reach[node] = gamma[node] * (reach[parent] if parent >= 0 else 1)
        if parent >= 0:
            ratio[node] = ratio[parent] * gamma[node]
            ratio[node, node] = 1
    return ratio, reach


def _topology(plan: TreePlan, parents: Sequence[int] | None) -> tuple[int, ...]:
    if plan.tree.parents is not None:
        return plan.tree.parents
    if parents is None:
        raise TreeError(f"any:{plan.tree.nodes} needs the parents of a tree to run on")
    tree = TreeTemplate.from_parents(parents)
    if tree.nodes > plan.tree.nodes or tree.depth > plan.depth:
        raise TreeError(
            f"a tree of {tree.nodes} nodes and depth {tree.depth} does not fit "
            f"any:{plan.tree.nodes} at depth {plan.depth}; compile a larger one"
        )
    return tuple(parents)

"""The recurrence on formal states, and what it is run on: polynomials, or residues of a prime.

A state is kept as the formal c S + sum_j k_j w_j^T, and keys and states meet only as symbols
k_i.k_j and k_i^T S. So what holds for them holds for every d_k. Where each key channel decays by
itself, the symbols stand for k_i^T D k_j and k_i^T D S, D the decays of the path between.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from sympy import ZZ
from sympy.polys.rings import ring

from bolegen.interpret import Matrix, Operands
from bolegen.ir import GDN, Mixer

__all__ = [
    "DRAWS",
    "SAMPLED_TREES",
    "draw_residues",
    "make_symbols",
    "run_recurrence",
    "sample_trees",
]

PRIME = 2**26 - 5
DRAWS = 4
SAMPLED_TREES = 4


def run_recurrence(
    parents: Sequence[int], operands: Operands, mixer: Mixer = GDN
) -> tuple[Matrix, Matrix]:
    """U and O, both [T, d_v], of a mixer: node after node, by its definition."""
    times, dot = operands.times, operands.dot
    u, o = np.zeros_like(operands.v), np.zeros_like(operands.v)
    root = (np.full((1, 1), 1, dtype=operands.decay.dtype), list[int](), u[:0])
    states: list[tuple[Matrix, list[int], Matrix]] = []
    for node, parent in enumerate(parents):
        c, path, w = root if parent < 0 else states[parent]
        row = slice(node, node + 1)
        if mixer.scales_state:
            c, w = times(c, operands.decay[row]), times(w, operands.decay[row])
        read = times(c, operands.ks[row]) + dot(operands.kk[row, path], w) if mixer.delta else 0
        u[row] = times(operands.beta[row], operands.v[row] - read)
        path, w = [*path, node], np.concatenate([w, u[row]])
        o[row] = operands.reduce(times(c, operands.qs[row]) + dot(operands.qk[row, path], w))
        states.append((c, path, w))
    return u, o


def make_symbols(sees: Matrix) -> Operands:
    """Operands of one value channel, every entry that can be read a generator of Z[...]."""
    nodes = range(len(sees))
    pairs = [(i, j) for i in nodes for j in nodes if sees[i, j]]
    rows = ("ks", "qs", "v", "decay", "beta")
    names = [f"{row}{i}" for row in rows for i in nodes]
    names += [f"{gram}{i}_{j}" for gram in ("qk", "kk") for i, j in pairs]
    generators = dict(zip(names, ring(names, ZZ)[1:], strict=True))
    ks, qs, v, decay, beta = (
        np.array([generators[f"{row}{i}"] for i in nodes], dtype=object) for row in rows
    )
    qk, kk = np.zeros((2, len(nodes), len(nodes)), dtype=object)
    for i, j in pairs:
        qk[i, j], kk[i, j] = generators[f"qk{i}_{j}"], generators[f"kk{i}_{j}"]
    return Operands(kk, qk, ks[:, None], qs[:, None], v[:, None], decay, beta)


def draw_residues(nodes: int) -> Iterator[Operands]:
    """DRAWS seeded draws of every operand of one value channel, residues of PRIME."""
    numbers = np.random.default_rng(20250803)
    for _ in range(DRAWS):
        kk, qk = numbers.integers(0, PRIME, (2, nodes, nodes))
        ks, qs, v = numbers.integers(0, PRIME, (3, nodes, 1))
        decay, beta = numbers.integers(0, PRIME, (2, nodes))
        yield Operands(kk, qk, ks, qs, v, decay, beta, modulus=PRIME)


def sample_trees(nodes: int, depth: int) -> Iterator[list[int]]:
    """The deepest chain, then trees of all nodes within ``depth``."""
    yield list(range(-1, depth))
    numbers = np.random.default_rng(20250804)
    for _ in range(SAMPLED_TREES):
        parents, levels = [-1], [0]
        for _ in range(1, nodes if depth else 1):
            open_nodes = [n for n, level in enumerate(levels) if level < depth]
            # near the newest node half of the time: deep trees and bushy ones
            recent = open_nodes[-1 - int(numbers.integers(min(3, len(open_nodes))))]
            parent = recent if numbers.integers(2) else int(numbers.choice(open_nodes))
            parents.append(parent)
            levels.append(levels[parent] + 1)
        yield parents

"""Proofs that a plan computes the recurrence (Bole section IV: lemmas 1 to 3, theorem 1).

The plan is proven as it will be executed: `interpret` runs it on polynomials, or on residues,
beside the recurrence itself (`formal`), with the mixer's own decay and delta term. One value
channel stands for all, since none meets another. Nothing is divided: decays of exactly 0 are
included.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from sympy import ZZ
from sympy.polys.rings import ring

from bolegen.errors import ProofError
from bolegen.formal import (
    DRAWS,
    SAMPLED_TREES,
    draw_residues,
    make_symbols,
    run_recurrence,
    sample_trees,
)
from bolegen.interpret import Matrix, ancestor_mask, decay_products, interpret, true_mask
from bolegen.ir import TreePlan, TreeTemplate, spell_template

__all__ = ["Certificate", "prove_plan"]

SYMBOLIC_NODES, SYMBOLIC_DEPTH = 64, 8
RESIDUES = f"exactly, on {DRAWS} seeded draws of all operands modulo the prime 2^26 - 5"

_NO_DELTA = "G = 0: the mixer has no delta term, so U = R and nothing is solved"

Difference = tuple[int, str] | None


@dataclass(frozen=True)
class Certificate:
    """What was proven of one plan; ``str`` gives the text for people.

    ``index`` is the nilpotency index of G: G^index = 0 and no smaller power is. ``method`` is
    "symbols" or "residues"; ``claims`` holds one sentence each.
    """

    template: str
    nodes: int
    depth: int
    index: int
    method: str
    claims: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.template}: {self.nodes} nodes, depth {self.depth}: proven"
        return "\n".join([head, *(f"  {claim}" for claim in self.claims)])


def prove_plan(plan: TreePlan) -> Certificate:
    """Prove that ``plan`` is exact, or raise ProofError naming the first node that breaks.

    Static templates of up to 64 nodes and depth 8: equality of integer polynomials. Larger
    ones: the residual (I + G) U - R = 0 and equality with the recurrence on random residues.
    That is exact arithmetic, and a plan with the right mask but wrong blocks passes a draw
    with probability at most the polynomials' degree, 3 depth + 4, over the prime (Schwartz
    and Zippel): 2.3e-5, and 3e-19 for all four. A runtime template is proven for every tree
    by the shape of its blocks, then run on a chain and on sampled trees.
    """
    return _prove_static(plan) if plan.tree.is_static else _prove_runtime(plan)


def _prove_static(plan: TreePlan) -> Certificate:
    tree = plan.tree
    assert tree.parents is not None
    _prove_mask(plan, tree.parents)
    index, claims = _prove_index(plan) if plan.spec.mixer.delta else (1, (_NO_DELTA,))
    symbolic = tree.nodes <= SYMBOLIC_NODES and tree.depth <= SYMBOLIC_DEPTH
    if symbolic:
        terms = _prove_by_symbols(plan, tree.parents)
        equal = f"U and O of every node equal the recurrence, as polynomials ({terms} terms)"
    else:
        _prove_by_residues(plan, tree.parents)
        equal = f"(I + G) U = R, and U and O of every node equal the recurrence, {RESIDUES}"
    method, claims = "symbols" if symbolic else "residues", (*claims, equal)
    return Certificate(spell_template(tree), tree.nodes, tree.depth, index, method, claims)


def _prove_index(plan: TreePlan) -> tuple[int, tuple[str, ...]]:
    """The nilpotency index of G, and that the plan's products with it make (I + G)^-1."""
    tree = plan.tree
    index = _find_index(ancestor_mask(plan))
    if index != tree.depth + 1:
        raise ProofError(f"G^{index} = 0, but depth {tree.depth} needs G^{tree.depth + 1} = 0")
    if plan.steps < tree.depth:
        node = tree.levels.index(tree.depth)
        raise ProofError(f"{plan.steps} steps are too few: node {node} is at level {tree.depth}")
    _prove_telescoping(tree.depth)
    vanish = f", {plan.depth - tree.depth} of {plan.depth} vanish" if plan.depth >= index else ""
    return index, (
        f"G^{index} = 0 and G^{index - 1} is not: {index - 1} products with G suffice{vanish}",
        f"(I + G) ({_spell_series(tree.depth)}) = I",
    )


def _prove_mask(plan: TreePlan, parents: Sequence[int]) -> None:
    """Each node sees its ancestors and nothing else."""
    mask, truth = ancestor_mask(plan), true_mask(parents)
    for i, j in np.argwhere(mask != truth):
        sees, is_one = ("sees", "not an ancestor") if mask[i, j] else ("misses", "an ancestor")
        raise ProofError(f"node {i} {sees} node {j}, which is {is_one} of it: a span is wrong")


def _find_index(mask: Matrix) -> int:
    """The nilpotency index of a G with this support.

    The entries of G are distinct monomials with coefficient 1, so nothing cancels in its
    powers: G^m is 0 exactly where G^m has no support on a vector of ones.
    """
    index, reached = 0, np.ones(len(mask), dtype=np.bool_)
    while reached.any():
        index, reached = index + 1, mask @ reached
    return index


def _prove_telescoping(steps: int) -> None:
    """(1 + g) sum_{m <= d} (-g)^m = 1 - (-g)^{d+1} in Z[g]; powers of one matrix commute."""
    _, g = ring("g", ZZ)
    series = sum(((-g) ** m for m in range(steps + 1)), start=0 * g)
    if (1 + g) * series != 1 - (-g) ** (steps + 1):
        raise ProofError(f"the series of {steps} products with G does not telescope")


def _spell_series(steps: int) -> str:
    terms = ["I", "- G", *(f"{'+-'[m % 2]} G^{m}" for m in range(2, steps + 1))][: steps + 1]
    return " ".join(terms if steps < 5 else [*terms[:2], "+ ...", terms[-1]])


def _prove_by_symbols(plan: TreePlan, parents: Sequence[int]) -> int:
    """Equality as polynomials; the largest number of terms in one entry.

    One leaf at a time, with everything that the tree or the plan lets it see. Other nodes
    are left out of both sides, which keeps polynomials small, and leaves whose part of the
    plan is the same but for the nodes' numbers share one proof.
    """
    sees = ancestor_mask(plan) | true_mask(parents) | np.eye(len(parents), dtype=np.bool_)
    terms, proven, wrong = 0, dict[TreePlan, Difference](), list[tuple[int, str]]()
    done = np.zeros(len(parents), dtype=np.bool_)
    while not done.all():
        reached = np.arange(len(parents)) == np.flatnonzero(~done)[-1]
        while (reached @ sees).sum() > reached.sum():
            reached = reached @ sees
        done |= reached
        kept = [int(node) for node in np.flatnonzero(reached)]
        part = _restrict(plan, kept)
        if part not in proven:
            operands = make_symbols(sees[np.ix_(kept, kept)])
            want = run_recurrence(part.tree.parents or (), operands, plan.spec.mixer)
            proven[part] = _find_difference(interpret(part, operands), want)
            terms = max(terms, *(len(entry) for entry in want[1][:, 0]))
        if difference := proven[part]:
            wrong.append((kept[difference[0]], difference[1]))
    _refute(min(wrong, default=None))
    return terms


def _restrict(plan: TreePlan, kept: list[int]) -> TreePlan:
    """The plan of the nodes in ``kept`` alone, renumbered; their parents are among them."""
    assert plan.tree.parents is not None and plan.spans is not None  # noqa: PT018
    number = {-1: -1} | {node: i for i, node in enumerate(kept)}
    first = sorted({plan.spans[node][0] for node in kept})
    blocks, start = [], 0
    for block in plan.blocks:
        nodes = tuple(number[node] for node in block.nodes if node in number and node >= 0)
        if nodes:
            blocks.append(replace(block, start=start, nodes=nodes))
            start += len(nodes)
    return replace(
        plan,
        tree=TreeTemplate.from_parents([number[plan.tree.parents[node]] for node in kept]),
        order=tuple(number[node] for node in plan.order if node in number),
        blocks=tuple(blocks),
        # ranks compare as the numbers themselves do
        spans=tuple(
            (first.index(plan.spans[node][0]), bisect_right(first, plan.spans[node][1]) - 1)
            for node in kept
        ),
    )


def _prove_by_residues(plan: TreePlan, parents: Sequence[int]) -> None:
    """Equality with the recurrence and a zero residual, on every draw."""
    mixer = plan.spec.mixer
    for operands in draw_residues(len(parents)):
        u, o = interpret(plan, operands, parents)
        _refute(_find_difference((u, o), run_recurrence(parents, operands, mixer)))
        times, beta = operands.times, operands.beta[:, None]
        ratio, reach = decay_products(parents, operands, mixer)
        sees = true_mask(parents) & mixer.delta
        g = np.where(sees, times(beta, times(ratio, operands.kk)), 0)
        r = times(beta, operands.v - mixer.delta * times(reach, operands.ks))
        residual = operands.reduce(u + operands.dot(g, u) - r)
        for node in np.flatnonzero(residual.any(axis=1)):
            raise ProofError(f"node {node}: (I + G) U - R is not 0")


def _find_difference(got: Sequence[Matrix], want: Sequence[Matrix]) -> Difference:
    """The first row where they differ, and which of U and O does."""
    rows = range(len(want[0]))
    pairs = tuple(zip("UO", got, want, strict=True))
    return next(((i, x) for i in rows for x, a, b in pairs if (a[i] != b[i]).any()), None)


def _refute(difference: Difference) -> None:
    if difference:
        node, letter = difference
        raise ProofError(f"node {node}: {letter} of the plan is not the recurrence's")


def _prove_runtime(plan: TreePlan) -> Certificate:
    nodes, depth, delta = plan.tree.nodes, plan.depth, plan.spec.mixer.delta
    _check_any_tree(plan)
    _prove_telescoping(depth)
    for parents in sample_trees(nodes, depth):
        if _find_index(true_mask(parents)) > depth + 1:
            raise ProofError(f"G^{depth + 1} is not 0 on the sampled tree {parents}")
        _prove_by_residues(plan, parents)
    index = (
        f"G^{depth + 1} = 0 for every tree of depth {depth}: a pair of G climbs a level or more",
        f"(I + G) ({_spell_series(depth)}) = I",
    )
    claims = (
        *(index if delta else (_NO_DELTA,)),
        f"for every tree of at most {nodes} nodes, parents first: each block follows those of "
        "its ancestors" + (" and repeats its own product often enough" if delta else ""),
        f"U and O equal the recurrence on the chain of depth {depth} and on {SAMPLED_TREES} "
        f"sampled trees, {RESIDUES}",
    )
    found = depth + 1 if delta else 1
    return Certificate(spell_template(plan.tree), nodes, depth, found, "residues", claims)


def _check_any_tree(plan: TreePlan) -> None:
    """What makes the blocks right for any tree: order, columns and products in each."""
    placed = [node for block in plan.blocks for node in block.nodes if node >= 0]
    for node, found in enumerate(zip_longest(range(plan.tree.nodes), placed)):
        if found != (node, node):
            raise ProofError(f"node {node} is not in its place: any tree needs the user's order")
    for block in plan.blocks:
        own = [node for node in block.nodes if node >= 0]
        longest = min(plan.depth, len(own) - 1)
        if not block.column and own and own[0] < plan.tree.nodes - 1:
            raise ProofError(f"node {own[0]} may have children, but its block has no columns")
        if plan.spec.mixer.delta and block.column and block.steps < longest:
            raise ProofError(f"node {own[-1]} may have {longest} ancestors in its own block")

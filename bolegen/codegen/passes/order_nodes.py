"""Bring the columns of G together."""

from collections.abc import Callable
from dataclasses import replace

from bolegen.ir import Solver, TreePlan

__all__ = ["order_nodes"]


def order_nodes(plan: TreePlan) -> TreePlan:
    """Nodes with descendants first, level by level. parents [-1,0,0,2]: 0,1,2,3 -> 0,2,1,3.

    Only they have non-zero columns in G, and in C off its diagonal. Under ``levels`` the level
    decides first. Parents stay before children.
    """
    if plan.any_may_have_columns:
        return plan
    levels, children = plan.tree.levels, plan.tree.children
    if plan.solver is Solver.LEVELS:
        return replace(plan, order=_sorted(plan, key=lambda n: (levels[n], not children[n], n)))
    return replace(plan, order=_sorted(plan, key=lambda n: (not children[n], levels[n], n)))


def _sorted(plan: TreePlan, key: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(range(plan.tree.nodes), key=key))

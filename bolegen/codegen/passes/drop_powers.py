"""Keep only the powers of G that do not vanish."""

from dataclasses import replace

from bolegen.ir import TreePlan

__all__ = ["drop_powers"]


def drop_powers(plan: TreePlan) -> TreePlan:
    """Products with G: what --depth allows -> what the tree needs. (3,3,3), depth 8: 8 -> 3.

    A non-zero entry of G^m is a path of m edges (paper, Lemma 3), so G^{d+1} = 0 with d the
    tree's own depth. Runtime topology keeps its bound. Without a delta term G itself is 0.
    """
    if not plan.tree.is_static or not plan.spec.mixer.delta:
        return plan
    steps = plan.tree.depth
    (block,) = plan.blocks
    return replace(plan, steps=steps, blocks=(replace(block, steps=steps),))

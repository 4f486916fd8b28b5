"""Choose how (I + G) U = R is solved, where the user did not."""

from dataclasses import replace

from bolegen.ir import Solver, TreePlan

__all__ = ["choose_solver"]


def choose_solver(plan: TreePlan) -> TreePlan:
    """Solver: horner where one block of 16 holds all columns of G. chain:64: -> substitution.

    More columns are substituted in blocks of 16, which is an eighth of the work at depth 8 and has
    no limit of depth. Without a delta term there is nothing to solve, and blocks may be large.
    """
    if plan.solver_is_chosen or not plan.spec.mixer.delta:
        return plan
    columns = len(plan.tree.internal) if plan.tree.is_static else plan.tree.nodes
    return replace(plan, solver=Solver.HORNER if columns <= 16 else Solver.SUBSTITUTION)

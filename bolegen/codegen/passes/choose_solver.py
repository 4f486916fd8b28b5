"""Choose how (I + G) U = R is solved, where the user did not."""

from dataclasses import replace

from bolegen.ir import Solver, TreePlan

__all__ = ["choose_solver"]

# nested (Horner) intermediates grow like 2.9^d with beta near 2: docs/theory.md, fact 1
_DEEPEST_HORNER = 32


def choose_solver(plan: TreePlan) -> TreePlan:
    """Solver: horner to 32 products, substitution above. chain:64: horner -> substitution."""
    if plan.solver_is_chosen:
        return plan
    columns = len(plan.tree.internal) if plan.tree.is_static else plan.tree.nodes
    small = columns <= 16 and plan.steps <= _DEEPEST_HORNER
    solver = Solver.HORNER if small else Solver.SUBSTITUTION
    return replace(plan, solver=solver)

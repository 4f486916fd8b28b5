"""Read first: template text -> tree -> plan -> passes -> kernels -> one Python module."""

from collections.abc import Callable

from bolegen.codegen.emit import EmittedModule, emit_module
from bolegen.codegen.lower import lower_plan
from bolegen.codegen.passes import PASSES
from bolegen.ir import (
    LayerSpec,
    Solver,
    Target,
    TreePlan,
    check_module,
    check_plan,
    parse_template,
    plan_tree,
)

__all__ = ["compile_plan", "compile_template", "plan_template"]

OnPass = Callable[[str, TreePlan], None]


def compile_template(
    template: str,
    spec: LayerSpec | None = None,
    *,
    depth: int | None = None,
    target: Target | None = None,
    solver: Solver | None = None,
) -> EmittedModule:
    """Compile ``template`` to the text of a module; nothing is written.

    Raises TreeError and SpecError for what the caller asked, CheckError and EmitError for
    bolegen's own mistakes.
    """
    return compile_plan(plan_template(template, spec, depth=depth, target=target, solver=solver))


def plan_template(
    template: str,
    spec: LayerSpec | None = None,
    *,
    depth: int | None = None,
    target: Target | None = None,
    solver: Solver | None = None,
    on_pass: OnPass | None = None,
) -> TreePlan:
    """The plan after every pass; each pass is checked, and seen by ``on_pass(name, plan)``."""
    tree = parse_template(template)
    plan = plan_tree(tree, spec, depth=depth, target=target, solver=solver)
    check_plan(plan)
    for run in PASSES:
        plan = run(plan)
        check_plan(plan)
        if on_pass is not None:
            on_pass(run.__name__, plan)
    return plan


def compile_plan(plan: TreePlan) -> EmittedModule:
    """Lower and emit a finished plan."""
    module = lower_plan(plan)
    check_module(module)
    return emit_module(plan, module)

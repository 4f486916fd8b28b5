"""What may exist at each level: run after every pass, so that no pass relies on folklore."""

from bolegen.errors import CheckError
from bolegen.ir.kernel import KernelModule
from bolegen.ir.plan import TreePlan

__all__ = ["check_module", "check_plan"]


def check_plan(plan: TreePlan) -> None:
    """Raise CheckError where ``plan`` is not complete and runnable."""
    nodes = range(plan.tree.nodes)
    _need(sorted(plan.order) == list(nodes), "order must list every node once")
    placed = [node for block in plan.blocks for node in block.nodes if node >= 0]
    _need(sorted(placed) == list(nodes), "blocks must place every node once")
    start = 0
    for block in plan.blocks:
        _need(block.start == start, f"block at {block.start} must start at {start}")
        _need(any(node >= 0 for node in block.nodes), f"block at {start} holds no node")
        start += block.rows
    _need(0 <= plan.steps <= plan.depth, f"steps {plan.steps} must lie in 0..{plan.depth}")
    if not plan.spec.mixer.delta:
        products = plan.steps or any(b.steps or b.inverted for b in plan.blocks)
        _need(not products, "without a delta term G is 0 and enters no product")
    _need(
        plan.precision.readout_terms != 1 or plan.spec.readout == "bf16",
        "Y and R enter O in one bf16 term only where the layer asks for it",
    )
    if plan.tiling.rolled:
        _need(not plan.precision.readout_terms, "column blocks in loops read Y back in float32")
        _need(all(b.inverted for b in plan.columns), "column blocks in loops must be inverted")
    if plan.tree.is_static:
        _check_static(plan)


def check_module(module: KernelModule) -> None:
    """Raise CheckError where kernels could not be emitted or told apart."""
    names = [kernel.label or kernel.name for kernel in module.kernels]
    _need(len(set(names)) == len(names), f"kernel names must differ: {names}")
    for name in [module.name, *names]:
        _need(name.isidentifier(), f"{name!r} must be an identifier")
    for kernel in module.kernels:
        params = [param.name for param in kernel.params]
        _need(len(set(params)) == len(params), f"{kernel.name}: argument names must differ")


def _check_static(plan: TreePlan) -> None:
    parents = plan.tree.parents or ()
    position = {node: i for i, node in enumerate(plan.order)}
    place = {n: i for b in plan.blocks for i, n in enumerate(b.nodes, b.start) if n >= 0}
    for node, parent in enumerate(parents):
        if parent >= 0:
            _need(position[parent] < position[node], f"order puts node {node} before its parent")
            _need(place[parent] < place[node], f"blocks put node {node} before its parent")
    if plan.spec.mixer.delta:
        _need(plan.steps >= plan.tree.depth, f"{plan.steps} steps, depth is {plan.tree.depth}")
    _need(plan.spans is not None and len(plan.spans) == len(parents), "a span for every node")
    home = {node: block for block in plan.blocks for node in block.nodes}
    for node in plan.tree.internal:
        _need(home[node].column, f"node {node} has descendants, so its block needs columns")
    if not plan.spec.mixer.delta:
        return
    for block in plan.blocks:
        inside = set(block.nodes)
        longest = max(
            sum(above in inside for above in plan.tree.path(node)[:-1])
            for node in block.nodes
            if node >= 0
        )
        _need(block.steps >= longest, f"block at {block.start} needs {longest} steps")


def _need(holds: bool, rule: str) -> None:
    if not holds:
        raise CheckError(f"plan breaks an invariant: {rule}; this is a bolegen bug")

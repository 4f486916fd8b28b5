"""Cut the padded positions into the blocks that the solve handles one after another."""

from collections.abc import Sequence
from dataclasses import replace

from bolegen.errors import SpecError
from bolegen.ir import ROW, Block, Solver, TreePlan, pad_rows

__all__ = ["split_blocks"]

_MOST_LEVEL_BLOCKS = 32
_DEEPEST_HORNER = 16  # products nested in one block
_LARGEST_INVERSE = 32


def split_blocks(plan: TreePlan) -> TreePlan:
    """One block of T rows -> blocks of 16 to 64 rows, those with descendants first.

    (3,3,3): 13 nodes with descendants in a block of 16 that applies G twice inside, then 27
    leaves in a block of 32 that has no columns.
    """
    groups = _groups(plan)
    if plan.solver is Solver.LEVELS and len(groups) > _MOST_LEVEL_BLOCKS:
        raise SpecError(
            f"solver levels would need {len(groups)} blocks for {plan.tree.depth + 1} levels, "
            f"at most {_MOST_LEVEL_BLOCKS} are built; use --solver substitution"
        )
    blocks: list[Block] = []
    start = 0
    for group in sorted(groups, key=lambda nodes: not _has_columns(plan, nodes)):
        blocks.append(_block(plan, start, group))
        start += len(group)
    if not plan.spec.mixer.delta:
        return replace(plan, blocks=tuple(blocks))
    return replace(plan, blocks=_invert(tuple(blocks)))


def _invert(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Several equal blocks are inverted together, each by its own steps on the identity."""
    sizes = [block.rows for block in blocks if block.column]
    if len(sizes) < 2 or len(set(sizes)) > 1 or sizes[0] > _LARGEST_INVERSE:
        return blocks
    if not any(block.steps for block in blocks):
        return blocks
    return tuple(replace(block, inverted=block.column) for block in blocks)


def _groups(plan: TreePlan) -> list[tuple[int, ...]]:
    """Nodes of each block, -1 for padding."""
    order, tree = plan.order, plan.tree
    largest = min(_largest(plan), plan.row_tile)
    if plan.any_may_have_columns:
        return _cut(order, largest)
    if plan.solver is Solver.LEVELS:
        levels = tree.levels
        by_level = [[n for n in order if levels[n] == d] for d in range(tree.depth + 1)]
        size = min(_level_size(by_level), plan.row_tile)
        return [group for nodes in by_level for group in _slice(nodes, size)]
    count = plan.column_nodes
    return _cut(order[:count], largest) + _cut(order[count:], 64)


def _largest(plan: TreePlan) -> int:
    if plan.solver is not Solver.SUBSTITUTION:
        # nested intermediates grow like 2.9^steps with beta near 2: docs/theory.md, fact 1
        return 64 if plan.steps <= _DEEPEST_HORNER else ROW
    return 16 if plan.tree.nodes <= 128 else 32


def _level_size(by_level: list[list[int]]) -> int:
    """Rows of every block, 16 or 32: equal, so that none lies across two of factor's row tiles."""
    blocks = sum(len(_slice(nodes, ROW)) for nodes in by_level)
    return ROW if blocks <= _MOST_LEVEL_BLOCKS else 2 * ROW


def _slice(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Groups of one size, the last padded."""
    cuts = [tuple(nodes[i : i + size]) for i in range(0, len(nodes), size)]
    return [cut + (-1,) * (size - len(cut)) for cut in cuts]


def _cut(nodes: Sequence[int], largest: int) -> list[tuple[int, ...]]:
    """Powers of two, largest first: 40 nodes are 32 + 16 rows, the last 8 of them padding."""
    groups: list[tuple[int, ...]] = []
    rest = list(nodes)
    while rest:
        size = min(largest, 1 << (pad_rows(len(rest)).bit_length() - 1))
        # the last of several equal blocks is padded to their size
        if groups and largest <= _LARGEST_INVERSE:
            size = largest
        group, rest = rest[:size], rest[size:]
        groups.append(tuple(group + [-1] * (size - len(group))))
    return groups


def _has_columns(plan: TreePlan, nodes: Sequence[int]) -> bool:
    """Whether a node of the group has descendants, or is treated so."""
    if plan.any_may_have_columns:
        return True
    treated = () if plan.solver is Solver.LEVELS else plan.order[: plan.column_nodes]
    return any(n in treated or plan.tree.children[n] for n in nodes if n >= 0)


def _block(plan: TreePlan, start: int, nodes: tuple[int, ...]) -> Block:
    column = _has_columns(plan, nodes)
    if not plan.spec.mixer.delta:
        return Block(start, nodes, column, steps=0)
    if not plan.tree.is_static:
        return Block(start, nodes, column, steps=min(plan.steps, len(nodes) - 1))
    inside = {node for node in nodes if node >= 0}
    parents = plan.tree.parents or ()
    above: dict[int, int] = {}
    # an ancestor outside the block may have ancestors inside it, so walk the whole path
    for node in sorted(inside):
        count, at = 0, parents[node]
        while at >= 0:
            count += at in inside
            at = parents[at]
        above[node] = count
    return Block(start, nodes, column, steps=max(above.values(), default=0))

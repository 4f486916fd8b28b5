"""Level 1: the plan of one verifier, complete and runnable after every pass."""

from dataclasses import dataclass, field
from enum import Enum

from bolegen.errors import SpecError
from bolegen.ir.mixer import Decay
from bolegen.ir.spec import PORTABLE_SMEM, LayerSpec, Target
from bolegen.ir.tree import TreeTemplate

__all__ = ["ROW", "Block", "Precision", "Solver", "Tiling", "TreePlan", "pad_rows", "plan_tree"]


ROW = 16  # smallest side of a tensor-core product
_NODE_TILE = 64  # most nodes that solve handles at once
_DEEPEST_PKU = 16  # of write gates up to 2: the entries of (I + G)^-1 hardly fall with distance


class Solver(Enum):
    """How (I + G) U = R is solved; all are exact (docs/theory.md, fact 1).

    HORNER: X <- R - G X inside blocks of up to 64 internal nodes. LEVELS: a block a level,
    so no product inside a block. SUBSTITUTION: blocks of 16 to 32 nodes, one after another.
    """

    HORNER = "horner"
    LEVELS = "levels"
    SUBSTITUTION = "substitution"


@dataclass(frozen=True)
class Block:
    """A run of padded positions that the solve handles at once.

    ``nodes`` holds the user's node of each position, -1 for padding; ``column`` says whether
    the block has a place in G's columns (where every node with descendants is) and ``steps``
    how often its diagonal block of G is applied: the most ancestors that a node has inside.
    ``inverted``: those steps are run once a head on the identity, X <- I - G X, and every row
    multiplies by the result instead.
    """

    start: int
    nodes: tuple[int, ...]
    column: bool
    steps: int
    inverted: bool = False

    @property
    def rows(self) -> int:
        """Padded positions in the block."""
        return len(self.nodes)


@dataclass(frozen=True)
class Precision:
    """How each product is formed (docs/theory.md, fact 3).

    ``state_terms``: bf16 terms of the state against q and k, 0 where it enters whole under
    ``dot``; ``readout_terms``: of R and Y against one another, likewise. ``dot`` and ``hip_dot``:
    products of fp32 pairs on NVIDIA and on AMD; ``fold``: those that form Y, where it may be less.
    """

    state_terms: int = 0
    readout_terms: int = 0
    dot: str = "ieee"
    hip_dot: str = "ieee"
    fold: str | None = None


@dataclass(frozen=True)
class Tiling:
    """Program shapes. Prepare: b_g nodes' gates, b_h nodes' channels, b_n nodes' rows at a time.
    Factor: b_r rows of Y, and a cap of registers a thread where it follows channels up a tree.
    Solve: the value tile b_v, the chunk b_k of d_k and a cap of registers a thread.
    Commit: b_t rows of a head's state, and how many nodes' rows are fetched ahead.

    How the number of requests cuts the work, without a bit of difference in the result: a program
    of prepare takes all nodes of its head from ``full_batch`` on, half of them from ``half_batch``
    on, else one tile; one of factor takes ``heads`` value heads from ``share_batch`` on, else one;
    up to ``merge_batch`` factor is not launched, every program of solve does its work.

    ``fused``: one loop over d_k forms the state's products with every tile of nodes at once.
    ``rolled``: Y's column blocks in loops, for more of them than are worth writing out.
    """

    b_n: int = 8
    b_r: int = 16
    b_v: int = 16
    b_k: int = 16
    b_g: int = 8
    b_h: int = 16
    b_t: int = 16
    ahead: int = 4
    heads: int = 1
    half_batch: int = 4
    full_batch: int = 16
    share_batch: int = 32
    merge_batch: int = 0
    warps_prepare: int = 4
    warps_factor: int = 4
    warps_solve: int = 4
    warps_commit: int = 1
    stages: int = 3
    maxnreg: int = 255
    maxnreg_factor: int | None = None
    maxnreg_folded: int = 168
    fused: bool = True
    rolled: bool = False


@dataclass(frozen=True)
class TreePlan:
    """Everything that Python decides about one generated module.

    ``depth`` is what the module supports, ``steps`` the products with G that remain after
    the powers that vanish are dropped, ``spans[i]`` the first and last preorder number in
    the subtree of node i (None for runtime topology): j is an ancestor of i exactly when
    first_j < first_i <= last_j.
    """

    tree: TreeTemplate
    spec: LayerSpec
    target: Target | None
    depth: int
    steps: int
    order: tuple[int, ...]
    blocks: tuple[Block, ...]
    spans: tuple[tuple[int, int], ...] | None
    solver: Solver
    solver_is_chosen: bool = False
    precision: Precision = field(default_factory=Precision)
    tiling: Tiling = field(default_factory=Tiling)

    @property
    def any_may_have_columns(self) -> bool:
        """Whether nodes with descendants are not told from leaves: at run time, and in a tree of
        many of them where columns hold every leaf as well, so that no node need move, or where
        channels decay, so that each row goes up its path once for all columns. With channels
        also where none has descendants, and no row would go up at all.
        """
        if not self.tree.is_static:
            return True
        inner, channel = len(self.tree.internal), self.spec.mixer.decay is Decay.CHANNEL
        if inner > ROW and self._splits_columns:
            return channel or self.column_nodes >= self.tree.nodes
        return channel and inner == 0

    @property
    def column_nodes(self) -> int:
        """Nodes that are given columns in a static tree: those with descendants, then leaves, up
        to a multiple of 16 if that saves rows, to a whole node tile of solve if it costs none.
        """
        nodes, count = self.tree.nodes, len(self.tree.internal)
        room = -count % ROW
        if pad_rows(nodes - count - room) < pad_rows(nodes - count):
            count += room
        tile = 1 << (pad_rows(count) - 1).bit_length()
        if self._splits_columns and pad_rows(count) < tile <= _NODE_TILE:
            rows = pad_rows(count) + pad_rows(nodes - count)
            count = tile if tile + pad_rows(nodes - tile) <= rows else count
        return min(count, nodes)

    @property
    def row_tile(self) -> int:
        """Most rows of Y that factor forms at once: 64, or fewer where operands of so many do not
        fit into shared memory. A block may not be larger, nor lie across two tiles.
        """
        smem = self.target.smem_bytes if self.target else PORTABLE_SMEM
        row = self.spec.dtype.bytes << (self.spec.d_k - 1).bit_length()
        rows = _NODE_TILE
        while rows > ROW and 3 * rows * row > smem:
            rows //= 2
        return rows

    @property
    def _splits_columns(self) -> bool:
        """Whether any number of columns will do: blocks are substituted, or nothing is solved."""
        return self.solver is Solver.SUBSTITUTION or not self.spec.mixer.delta

    @property
    def reach_terms(self) -> int:
        """Terms of rows that decay by channel: two in bf16, or one in float32."""
        return 2 if self.precision.state_terms else 1

    @property
    def rows(self) -> int:
        """Padded positions in all blocks."""
        return sum(block.rows for block in self.blocks)

    @property
    def places(self) -> tuple[int, ...]:
        """Node of each row of scratch: the blocks' nodes, one after another, without padding."""
        return tuple(node for block in self.blocks for node in block.nodes if node >= 0)

    @property
    def columns(self) -> tuple[Block, ...]:
        """Blocks that have columns in G and, off the diagonal, in C."""
        return tuple(block for block in self.blocks if block.column)

    @property
    def column_count(self) -> int:
        """Columns of the stored G and C, padding included."""
        return sum(block.rows for block in self.columns)


def plan_tree(
    tree: TreeTemplate,
    spec: LayerSpec | None = None,
    *,
    depth: int | None = None,
    target: Target | None = None,
    solver: Solver | None = None,
) -> TreePlan:
    """The naive plan: user's order, one block, every column, ``depth`` products with G.

    ``depth`` is the largest depth in edges that the module supports, the template's own by
    default and never more than a tree of N nodes can have. Raises SpecError where it is smaller
    than a static template's.
    """
    if depth is None:
        depth = tree.depth
    if depth < 0:
        raise SpecError(f"depth {depth} is negative; it counts edges from the root")
    if tree.is_static and depth < tree.depth:
        raise SpecError(
            f"depth {depth} is smaller than the template's {tree.depth}: nodes below level "
            f"{depth} would be wrong. Use --depth {tree.depth} or more."
        )
    if not tree.is_static:
        depth = min(depth, tree.nodes - 1)
    if solver is Solver.LEVELS and not tree.is_static:
        raise SpecError("solver levels needs a static template; use horner or substitution")
    spec = spec or LayerSpec()
    if solver is not None and not spec.mixer.delta:
        raise SpecError(
            f"solver {solver.value}: mixer {spec.mixer.name} has no delta term, so U = R and "
            "nothing is solved; leave --solver out"
        )
    if spec.factors == "pku" and spec.mixer.write_gate.startswith("2") and depth > _DEEPEST_PKU:
        raise SpecError(
            f"factors pku at depth {depth}: with write gates up to 2 (mixer {spec.mixer.name}) U "
            f"leaves the fp32 contract beyond depth {_DEEPEST_PKU}; use --factors replay"
        )
    nodes = tuple(range(tree.nodes))
    steps = depth if spec.mixer.delta else 0
    return TreePlan(
        tree=tree,
        spec=spec,
        target=target,
        depth=depth,
        steps=steps,
        order=nodes,
        blocks=(Block(0, nodes, column=True, steps=steps),),
        spans=_number_spans(tree) if tree.is_static else None,
        solver=solver or Solver.HORNER,
        solver_is_chosen=solver is not None,
    )


def pad_rows(count: int) -> int:
    """The next multiple of 16, 0 for none."""
    return -(-max(count, 0) // ROW) * ROW


def _number_spans(tree: TreeTemplate) -> tuple[tuple[int, int], ...]:
    """Preorder interval of each subtree, without recursion: 512 levels are legal."""
    sizes = [1] * tree.nodes
    parents = tree.parents or ()
    for node in reversed(range(1, tree.nodes)):
        sizes[parents[node]] += sizes[node]
    first = [0] * tree.nodes
    for node in range(tree.nodes):
        start = first[node] + 1
        for child in tree.children[node]:
            first[child] = start
            start += sizes[child]
    return tuple((first[n], first[n] + sizes[n] - 1) for n in range(tree.nodes))

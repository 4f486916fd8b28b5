"""Level 0: the draft tree, as a frozen value."""

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bolegen.errors import TreeError

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["MAX_NODES", "TreeTemplate"]

MAX_NODES = 512


@dataclass(frozen=True)
class TreeTemplate:
    """The topology of a draft tree; node 0 is the root and parents come before children.

    ``parents[i]`` is the parent of node i, -1 for the root. A template whose topology is
    given at run time has ``parents=None`` and at most ``nodes`` nodes. Equality is equality
    of topology. Raises TreeError for anything but one rooted tree of 1 to 512 nodes.
    """

    nodes: int
    parents: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise TreeError(
                f"a template has 1 to {MAX_NODES} nodes, not {self.nodes}; "
                "verify a smaller tree, or several requests"
            )
        if self.parents is None:
            return
        if len(self.parents) != self.nodes:
            raise TreeError(f"{self.nodes} nodes need as many parents, not {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            _check_parent(node, parent, self.nodes)

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> "TreeTemplate":
        """The tree with these parents: ``[-1, 0, 0, 1]`` is a root, two children, a grandchild."""
        if len(parents) == 0:
            raise TreeError("a tree needs at least its root; the parents are empty. Try [-1].")
        return cls(len(parents), tuple(operator.index(parent) for parent in parents))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> "TreeTemplate":
        """Every node of level l has ``branching[l]`` children, in level order.

        ``(3, 3, 3)`` has 1 + 3 + 9 + 27 = 40 nodes and depth 3.
        """
        for level, width in enumerate(branching):
            if width < 1:
                raise TreeError(
                    f"branching at level {level} is {width}; every branching number is at "
                    "least 1. A root alone is chain:0."
                )
        parents, frontier = [-1], [0]
        for width in branching:
            if len(parents) + len(frontier) * width > MAX_NODES:
                raise TreeError(
                    f"branching {_brief(branching)} has more than {MAX_NODES} nodes; "
                    "use fewer levels or smaller numbers"
                )
            first = len(parents)
            parents += [p for p in frontier for _ in range(width)]
            frontier = list(range(first, len(parents)))
        return cls(len(parents), tuple(parents))

    @classmethod
    def from_edges(cls, edges: Iterable[tuple[int, int]]) -> "TreeTemplate":
        """The tree of these (parent, child) edges, nodes renumbered in level order."""
        import networkx as nx

        graph = nx.DiGraph(list(edges))
        if graph.number_of_nodes() == 0 or not nx.is_arborescence(graph):
            raise TreeError(
                "edges must form one rooted tree: one root, one parent for every other node, "
                "no cycle"
            )
        root = next(n for n, degree in graph.in_degree() if degree == 0)
        order = [root, *(child for _, child in nx.bfs_edges(graph, root))]
        index = {node: i for i, node in enumerate(order)}
        parents = [-1] * len(order)
        for parent, child in graph.edges:
            parents[index[child]] = index[parent]
        return cls.from_parents(parents)

    @classmethod
    def runtime(cls, nodes: int) -> "TreeTemplate":
        """Topology read from device memory each round, at most ``nodes`` nodes."""
        return cls(nodes, None)

    @property
    def is_static(self) -> bool:
        """Whether the topology is known to the compiler."""
        return self.parents is not None

    @cached_property
    def graph(self) -> "nx.DiGraph[int]":
        """The tree as a frozen networkx graph, edges from parent to child (static only)."""
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(self.nodes))
        graph.add_edges_from((p, i) for i, p in enumerate(self._known()) if p >= 0)
        return nx.freeze(graph)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Distance of each node from the root, in edges."""
        levels: list[int] = []
        for parent in self._known():
            levels.append(0 if parent < 0 else levels[parent] + 1)
        return tuple(levels)

    @property
    def depth(self) -> int:
        """Largest distance from the root, in edges; a runtime template could be a chain."""
        return max(self.levels) if self.is_static else self.nodes - 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in node order."""
        children: list[list[int]] = [[] for _ in range(self.nodes)]
        for node, parent in enumerate(self._known()):
            if parent >= 0:
                children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def internal(self) -> tuple[int, ...]:
        """Nodes with descendants: the only non-zero columns of G (docs/theory.md)."""
        return tuple(node for node, kids in enumerate(self.children) if kids)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to ``node``, both included."""
        parents, path = self._known(), []
        while node >= 0:
            path.append(node)
            node = parents[node]
        return tuple(reversed(path))

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that name the topology."""
        return hashlib.sha256(repr((self.nodes, self.parents)).encode()).hexdigest()[:8]

    def _known(self) -> tuple[int, ...]:
        if self.parents is None:
            raise TreeError(
                f"any:{self.nodes} has no topology before run time; use a static template"
            )
        return self.parents


def _check_parent(node: int, parent: int, nodes: int) -> None:
    if abs(parent) > 1_000_000:
        raise TreeError(f"node {node} is an orphan: its parent is far outside of {nodes} nodes")
    if node == 0 and parent != -1:
        raise TreeError(f"node 0 is the root, so its parent is -1, not {parent}")
    if node == 0:
        return
    if parent == -1:
        raise TreeError(f"node {node} has parent -1, a second root; only node 0 has no parent")
    if not 0 <= parent < nodes:
        raise TreeError(
            f"node {node} is an orphan: its parent {parent} is not one of {nodes} nodes"
        )
    if parent == node:
        raise TreeError(f"node {node} is its own parent, a cycle; a parent has a smaller number")
    if parent > node:
        raise TreeError(
            f"node {node} has parent {parent}; parents come before children. "
            "Reorder with TreeTemplate.from_edges()."
        )


def _brief(branching: Sequence[int]) -> str:
    text = ",".join(str(w) for w in branching[:8])
    return f"({text}{',...' if len(branching) > 8 else ''})"

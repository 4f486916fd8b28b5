"""Paths of a tree, as far as they are live."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bolegen.errors import TreeError

__all__ = ["Array", "Live", "Parents", "as_float", "find_path", "walk_nodes"]

Array = NDArray[np.float64]
Parents = Sequence[int] | NDArray[np.integer[Any]]
Live = Sequence[bool] | NDArray[np.bool_]


def find_path(parents: Parents, node: int, *, live: Live | None = None) -> list[int]:
    """Nodes from the root to ``node``, both included.

    Empty where there is no such node, or a dead one. Raises TreeError where a parent does
    not come before its child.
    """
    node = int(node)
    if not 0 <= node < len(parents) or (live is not None and not live[node]):
        return []
    path = [node]
    while path[-1] > 0:
        path.append(_parent(parents, path[-1]))
    return path[::-1]


def walk_nodes(parents: Parents, live: Live | None) -> list[int]:
    """Live nodes, parents first; TreeError where they are no tree."""
    order: list[int] = []
    for node in range(len(parents)):
        if live is not None and not live[node]:
            continue
        parent = _parent(parents, node)
        if live is not None and parent >= 0 and not live[parent]:
            raise TreeError(
                f"node {node} is live but its parent {parent} is dead; live is prefix-closed: "
                "set the parent live or the node dead"
            )
        order.append(node)
    return order


def as_float(x: ArrayLike) -> Array:
    """Widened to float64."""
    return np.asarray(x, dtype=np.float64)


def _parent(parents: Parents, node: int) -> int:
    """The parent of ``node``, TreeError where that makes no tree."""
    parent = int(parents[node])
    if parent != -1 if node == 0 else not 0 <= parent < node:
        raise TreeError(
            f"node {node} has parent {parent}; the root, node 0, has -1 and every other node a "
            "parent with a smaller number"
        )
    return parent

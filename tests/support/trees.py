"""Trees as engines give them, and what a plain walk over them finds."""

import random
from typing import TypeAlias

__all__ = ["Row", "draw_tree", "links_of", "walk_links", "walk_parents"]

Row: TypeAlias = list[int]


def draw_tree(numbers: random.Random, nodes: int, depth: int) -> Row:
    """Parents of a random recursive tree of at most this depth."""
    parents, levels = [-1], [0]
    while len(parents) < nodes:
        parent = numbers.randrange(len(parents))
        if levels[parent] < depth:
            parents.append(parent)
            levels.append(levels[parent] + 1)
    return parents


def walk_parents(given: Row, count: int, keep: list[bool]) -> tuple[Row, list[bool]]:
    """The rule by definition, node by node: parents of the live ones, and which those are."""
    n = len(given)
    live = [False] * n
    for i in range(min(count, n)):
        linked = i == 0 or (0 <= given[i] < i and live[given[i]])
        live[i] = linked and keep[i]
    return [given[i] if i and live[i] else -1 for i in range(n)], live


def walk_links(first: Row, sibling: Row, count: int, keep: list[bool]) -> tuple[Row, list[bool]]:
    """The same from links; a node with two links to it has no parent."""
    n = min(count, len(first))
    incoming: dict[int, list[tuple[str, int]]] = {}
    for i in range(n):
        if i < first[i] < n:
            incoming.setdefault(first[i], []).append(("child", i))
        if i > 0 and i < sibling[i] < n:
            incoming.setdefault(sibling[i], []).append(("sibling", i))
    parents = [-1] * len(first)
    for i in range(1, n):
        if len(incoming.get(i, [])) == 1:
            kind, before = incoming[i][0]
            parents[i] = before if kind == "child" else parents[before]
    return walk_parents(parents, count, keep)


def links_of(parents: Row) -> tuple[Row, Row]:
    """First children and next siblings, both in ascending order, as engines build them."""
    first, sibling = [-1] * len(parents), [-1] * len(parents)
    last: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if node == 0:
            continue
        if parent in last:
            sibling[last[parent]] = node
        else:
            first[parent] = node
        last[parent] = node
    return first, sibling

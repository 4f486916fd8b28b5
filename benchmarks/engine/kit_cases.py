"""The GDN verify cases of SGLang's attention test kit, and further trees for the same kit."""

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """One of the kit's cases; ``plan`` says how it is changed.

    plan: "kit" not at all; "tree" the backend has its topk, the layer taps and SiLU; "bare" its
    topk alone, which the plugin refuses. parents [N]; spare: rows of a graph beyond the requests.
    """

    name: str
    parents: tuple[int, ...]
    plan: str = "tree"
    graph: bool = False
    topk: int = 2
    kind: str = "eagle"
    prefix: tuple[int, ...] = (5, 6)
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (32, 32)
    spare: int = 0

    @property
    def depth(self) -> int:
        """Edges of the longest path."""
        levels: list[int] = []
        for parent in self.parents:
            levels.append(0 if parent < 0 else levels[parent] + 1)
        return max(levels)

    def links(self) -> tuple[list[int], list[int]]:
        """First children and next siblings."""
        first, sibling = [-1] * len(self.parents), [-1] * len(self.parents)
        for parent in set(self.parents) - {-1}:
            children = [i for i, p in enumerate(self.parents) if p == parent]
            first[parent] = children[0]
            for before, after in pairwise(children):
                sibling[before] = after
        return first, sibling


CHAIN, FORK = (-1, 0, 1), (-1, 0, 0)
BEAM = (-1, *(0 if i < 5 else i - 4 - i % 3 % 2 for i in range(1, 16)))
WIDE = (-1, *((i - 1) // 3 for i in range(1, 40)))
CASES = (
    *(
        Case(f"kit {kind} chain", CHAIN, "kit", graph, 1, kind, (4, 7))
        for kind in ("eagle", "frozen_kv_mtp", "dflash", "ngram")
        for graph in (False, True)
    ),
    *(Case("kit eagle tree", FORK, "kit", graph) for graph in (False, True)),
    Case("bare tree", FORK, "bare"),
    *(
        Case(name, parents, graph=graph, **options)
        for graph in (False, True)
        for name, parents, options in (
            ("fork", FORK, {}),
            ("fork by ngram", FORK, {"kind": "ngram"}),
            ("chain in a tree's server", (-1, 0, 1, 2), {}),
            ("beam of 16", BEAM, {"prefix": (0, 3, 9), "heads": (2, 4), "dims": (128, 128)}),
            ("40 nodes", WIDE, {"prefix": (2, 3, 5, 7, 11), "dims": (64, 128)}),
        )
    ),
    Case("fork, padded", FORK, graph=True, spare=2),
    Case("beam of 16, padded", BEAM, graph=True, spare=3, dims=(128, 128)),
)

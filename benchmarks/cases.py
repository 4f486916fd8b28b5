"""What is compared: layer shapes, draft trees, and the list of cases.

A tree is named: ``333``, ``chain8`` (nodes, the root included), ``eagle64`` (what EAGLE-2 would
draft, 8 edges deep), ``random64d8`` (nodes, depth). With ``any:`` before it the module learns
the topology at run time.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bolegen.codegen import EmittedModule, compile_template
from bolegen.ir import (
    DELTANET,
    GDN,
    KDA_BOUNDED,
    MAMBA2,
    MIXERS,
    DType,
    LayerSpec,
    Mixer,
    TreeTemplate,
    parse_template,
)
from bolegen.models import find_model

__all__ = [
    "MODELS",
    "NUMERICS",
    "Case",
    "Shape",
    "list_cases",
    "list_mixers",
    "list_scaling",
    "tree_depth",
    "tree_parents",
]

EAGLE_DEPTH = 8
EAGLE_TOP = 8


@dataclass(frozen=True)
class Shape:
    """Heads, dims, recurrent layers and mixer of one model; ``bias`` of its convolution."""

    key_heads: int
    value_heads: int
    layers: int
    d_k: int = 128
    d_v: int = 128
    mixer: Mixer = GDN
    bias: bool = False


def _shape_of(name: str, **other: Any) -> Shape:
    """A known model's shape, but for what is said otherwise."""
    m = find_model(name)
    shape = Shape(m.key_heads, m.value_heads, m.layers, m.d_k, m.d_v, m.mixer)
    return replace(shape, **other)


MODELS = {
    "9B": _shape_of("qwen3.5-9b"),
    "27B": _shape_of("qwen3.5-27b"),
    "122B": _shape_of("qwen3.5-122b-a10b"),
    "Kimi-Linear": _shape_of("kimi-linear-48b-a3b"),
    # its heads, with the bounded gate that GLM-5.3-Flash and Ling have
    "Kimi-K3": _shape_of("kimi-k3", mixer=KDA_BOUNDED),
    "Nemotron-H-8B": _shape_of("nemotron-h-8b", bias=True),
    "OLMo-Hybrid": _shape_of("olmo-hybrid-7b"),
    "DeltaNet-1.3B": Shape(16, 16, 24, mixer=DELTANET),
    "MiniMax-01": _shape_of("minimax-text-01"),
    # for the interpreter
    "tiny": Shape(1, 2, 2, 16, 16),
} | {
    f"tiny-{name}": Shape(1, 2, 2, 16, 16, mixer=mixer, bias=mixer is MAMBA2)
    for name, mixer in MIXERS.items()
}


# what the layer is asked for, by the name of a column
NUMERICS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"contract": "tf32"},
    "bf16-readout": {"readout": "bf16"},
}


@dataclass(frozen=True)
class Case:
    """One row of the comparison: a suite, a model, a tree and a batch."""

    suite: str  # verify, commit, round, accuracy, mixer or scaling
    model: str
    tree: str
    batch: int
    state: str = "fp32"
    numerics: str = "fp32"

    @property
    def key(self) -> str:
        """Its name, as ``--only`` matches it."""
        name = f"{self.suite}/{self.model}/{self.tree}/B{self.batch}/{self.state}"
        return f"{name}/{self.numerics}" if self.suite == "accuracy" else name

    @property
    def whole(self) -> bool:
        """Whether one run covers all layers of the model."""
        return self.suite in ("commit", "round")

    @property
    def runtime(self) -> bool:
        """Whether the topology is given at run time."""
        return self.tree.startswith("any:")

    @property
    def parents(self) -> tuple[int, ...]:
        """The tree that every request drafts."""
        return tree_parents(self.tree.removeprefix("any:"))

    @property
    def chain(self) -> bool:
        """Whether the tree is a chain."""
        return self.tree.startswith("chain")

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return MODELS[self.model]

    @property
    def spec(self) -> LayerSpec:
        """The layer that the module is compiled for."""
        shape = self.shape
        return LayerSpec(
            mixer=shape.mixer,
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            d_k=shape.d_k,
            d_v=shape.d_v,
            state_dtype=DType(self.state),
            **NUMERICS[self.numerics],
        )

    def compile(self) -> EmittedModule:
        """The text of our module for this case."""
        parents = self.parents
        if self.runtime:
            return compile_template(f"any:{len(parents)}", self.spec, depth=tree_depth(parents))
        if self.tree == "333":
            return compile_template("(3,3,3)", self.spec, depth=8)
        if self.chain:
            return compile_template(f"chain:{len(parents) - 1}", self.spec)
        return compile_template("parents:" + str(list(parents)).replace(" ", ""), self.spec)


def list_cases() -> Iterator[Case]:
    """The comparison, most wanted first."""
    batches = (1, 8, 32)
    trees = ("333", "eagle64", "any:eagle64", "eagle128", "any:eagle128", "chain8")
    for model in ("9B", "122B", "27B"):
        yield from (Case("verify", model, tree, batch) for tree in trees for batch in batches)
        yield from (Case("commit", model, "333", batch) for batch in batches)
        if model == "9B":
            yield from (Case("commit", model, "eagle64", batch) for batch in batches)
            yield from (Case("round", model, "333", batch) for batch in batches)
            yield from (Case("verify", model, "333", batch, "bf16") for batch in batches)
    yield from list_accuracy()


def list_accuracy() -> Iterator[Case]:
    """Ours alone: what each numerics costs and how far it errs, on the same operands."""
    for tree in ("333", "eagle64"):
        for batch in (1, 8, 32):
            for numerics in NUMERICS:
                yield Case("accuracy", "9B", tree, batch, numerics=numerics)


def list_mixers() -> Iterator[Case]:
    """The other mixers: those whose trees a peer verifies over batches, the rest at one."""
    for model in ("Kimi-Linear", "Nemotron-H-8B"):
        for tree in ("eagle64", "any:eagle64", "333"):
            yield from (Case("mixer", model, tree, batch) for batch in (16, 1, 8, 32))
    for model in ("Kimi-K3", "OLMo-Hybrid", "DeltaNet-1.3B", "MiniMax-01"):
        yield from (Case("mixer", model, tree, 16) for tree in ("eagle64", "any:eagle64", "333"))


def list_scaling() -> Iterator[Case]:
    """Ours alone over nodes, depth and batch, topology compiled in and given at run time."""
    trees = [(f"random{nodes}d{min(8, nodes // 2)}", 8) for nodes in (8, 16, 32, 64, 128, 256)]
    trees += [(f"random64d{depth}", 8) for depth in (2, 4, 16, 32)]
    trees += [("random64d8", batch) for batch in (1, 2, 4, 16, 32, 64)]
    for tree, batch in trees:
        yield Case("scaling", "9B", tree, batch)
        # Triton needs many minutes for 256 nodes whose topology is not known
        if len(tree_parents(tree)) < 256:
            yield Case("scaling", "9B", f"any:{tree}", batch)


@cache
def tree_parents(name: str) -> tuple[int, ...]:
    """Parents of a named tree, -1 for the root."""
    if name == "333":
        return tuple(parse_template("(3,3,3)").parents or ())
    kind, nodes, depth = re.fullmatch(r"([a-z]+)(\d+)d?(\d*)", name).groups()  # type: ignore[union-attr]
    if kind == "chain":
        return tuple(range(-1, int(nodes) - 1))
    if kind == "eagle":
        return _draft_eagle(int(nodes))
    if kind == "random":
        return _draw_random(int(nodes), int(depth))
    raise ValueError(f"tree {name!r} not known; have 333, chainN, eagleN, randomNdD")


def tree_depth(parents: tuple[int, ...]) -> int:
    """Edges from the root to the deepest node."""
    return TreeTemplate.from_parents(parents).depth


def _draft_eagle(nodes: int) -> tuple[int, ...]:
    """Expand the likeliest nodes of each level, keep the likeliest of all; the first such tree
    of a fixed sequence that is 8 edges deep.
    """
    gen = random.Random(1234)
    while True:
        drafted = [(-1, 0.0)]  # parent and log probability, levels in order
        frontier = [0]
        for _ in range(EAGLE_DEPTH):
            below = []
            for parent in frontier:
                for log_p in _draw_log_probabilities(gen):
                    below.append(len(drafted))
                    drafted.append((parent, drafted[parent][1] + log_p))
            frontier = sorted(below, key=lambda node: -drafted[node][1])[:EAGLE_TOP]
        # a child is never likelier than its parent, so what is kept is a tree
        likeliest = sorted(range(len(drafted)), key=lambda node: -drafted[node][1])
        kept = sorted(likeliest[:nodes])
        index = {node: place for place, node in enumerate(kept)}
        parents = tuple(index.get(drafted[node][0], -1) for node in kept)
        if tree_depth(parents) == EAGLE_DEPTH:
            return parents


def _draw_log_probabilities(gen: random.Random) -> list[float]:
    logits = sorted((gen.gauss(0, 2) for _ in range(EAGLE_TOP)), reverse=True)
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def _draw_random(nodes: int, depth: int) -> tuple[int, ...]:
    """A spine of ``depth`` edges, and nodes that hang from any node above that depth."""
    gen = random.Random(nodes * 1000 + depth)
    parents = list(range(-1, depth))
    levels = list(range(depth + 1))
    while len(parents) < nodes:
        parent = gen.choice([node for node, level in enumerate(levels) if level < depth])
        parents.append(parent)
        levels.append(levels[parent] + 1)
    return tuple(parents)

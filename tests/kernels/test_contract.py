"""Emitted modules agree with the float64 recurrence within the contract, whatever the options."""

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bolegen.ir import MIXERS, DType, Solver, TreeTemplate, spell_template
from support.rounds import build, make_round, play
from support.strategies import live_masks, trees

BUSHY = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
OPTIONS: dict[str, list[Any]] = {
    "mixer": list(MIXERS),
    "heads": [(1, 1), (2, 4), (2, 6), (1, 4), (1, 8), (3, 3)],
    "dims": [(16, 16), (24, 40), (32, 80), (112, 80), (96, 192)],
    "template": ["chain:4", "(2,2)", "(7)", f"parents:{BUSHY}".replace(" ", ""), "any:9"],
    "dtype": list(DType),
    "conv": [2, 3, 4],
    "solver": list(Solver),
    "state_dtype": [DType.FP32, DType.BF16],
    "factors": ["replay", "pku"],
    "bias": [False, True],
    "live": [False, True],
    "convolved": [False, True],
    "repeat": [0.0, 0.9],
    "log_rate": [(-4.0, 1.5), (2.0, 4.0)],
}


def is_legal(case: dict[str, Any]) -> bool:
    """Levels are known to the compiler only where the topology is."""
    return not (case["solver"] is Solver.LEVELS and case["template"].startswith("any"))


def pairs_of(case: dict[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def pairwise() -> list[dict[str, Any]]:
    """Few choices of all options that hold every pair of values; the same in every process."""
    numbers = random.Random(0)
    missing: list[frozenset[tuple[str, Any]]] = []
    for one, other in combinations(OPTIONS, 2):
        values = [(x, y) for x in OPTIONS[one] for y in OPTIONS[other]]
        missing += [frozenset({(one, x), (other, y)}) for x, y in values]
    cases: list[dict[str, Any]] = []
    while missing:
        tries: list[dict[str, Any]] = []
        while len(tries) < 20:
            case = {name: numbers.choice(values) for name, values in OPTIONS.items()}
            case |= dict(missing[0])
            if is_legal(case):
                tries.append(case)
            elif not is_legal({"solver": None, "template": ""} | dict(missing[0])):
                break
        if not tries:
            missing.pop(0)
            continue
        best = max(tries, key=lambda case: len(pairs_of(case).intersection(missing)))
        cases.append(best)
        missing = [pair for pair in missing if pair not in pairs_of(best)]
    return cases


def prune(tree: list[int], seed: int) -> list[bool]:
    """A prefix-closed part of a tree, its root included."""
    numbers, live = random.Random(seed), [True]
    for parent in tree[1:]:
        live.append(live[parent] and numbers.random() < 0.7)
    return live


def deepest(tree: list[int], live: list[bool]) -> int:
    levels = TreeTemplate.from_parents(tree).levels
    return max((n for n in range(len(tree)) if live[n]), key=lambda n: levels[n])


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(getattr(value, "value", value)) for value in case.values())


@pytest.mark.parametrize("case", pairwise(), ids=name_of)
def test_every_pair_of_options(case: dict[str, Any]) -> None:
    (key_heads, value_heads), (d_k, d_v) = case["heads"], case["dims"]
    m = build(
        case["template"],
        depth=5,
        mixer=case["mixer"],
        solver=case["solver"] if MIXERS[case["mixer"]].delta else None,
        key_heads=key_heads,
        value_heads=value_heads,
        d_k=d_k,
        d_v=d_v,
        conv=case["conv"],
        dtype=case["dtype"],
        state_dtype=case["state_dtype"],
        factors=case["factors"],
    )
    given_trees = [BUSHY, [-1, 0, 1, 2, 3, 4, 0, 0, 1]] if m.MODULE.parents is None else None
    hostile = {name: case[name] for name in ("repeat", "log_rate")}
    r = make_round(m, trees=given_trees, bias=case["bias"], **hostile)
    masks = [
        prune(tree, seed) if case["live"] else [True] * 9 for seed, tree in enumerate(r.trees)
    ]
    masks = [mask[: m.MODULE.nodes] for mask in masks]
    r.live = torch.tensor(masks) if case["live"] else None
    last = [deepest(tree, mask) for tree, mask in zip(r.trees, masks, strict=True)]
    play(m, r, last, convolved=case["convolved"]).assert_within()


def spell(parents: list[int]) -> str:
    return spell_template(TreeTemplate.from_parents(parents))


def grow(nodes: int, depth: int, seed: int = 0) -> list[int]:
    """A random recursive tree of at most this depth."""
    numbers, parents, levels = random.Random(seed), [-1], [0]
    while len(parents) < nodes:
        parent = numbers.randrange(len(parents))
        if levels[parent] < depth:
            parents.append(parent)
            levels.append(levels[parent] + 1)
    return parents


SHAPES: dict[str, Callable[[int], list[int]]] = {
    "chain": lambda n: list(range(-1, n - 1)),
    "star": lambda n: [-1] + [0] * (n - 1),
    "caterpillar": lambda n: [-1] + [(i - 1) // 2 * 2 for i in range(1, n)],
    "one long branch and many leaves": lambda n: [-1, *range(n // 2), *[0] * (n - n // 2 - 1)],
    "recursive": lambda n: grow(n, n, seed=n),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_trees(shape: str) -> None:
    m = build(spell(SHAPES[shape](18)), factors="pku")
    play(m, make_round(m), [17, 9]).assert_within()


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 9, 15, 16, 17, 33, 63, 65])
def test_node_counts_off_and_on_tiles(nodes: int) -> None:
    tree = grow(nodes, depth=6, seed=nodes)
    for template in (spell(tree), f"any:{nodes}"):
        m = build(template, depth=6, value_heads=1)
        play(m, make_round(m, batch=1, trees=[tree]), [nodes - 1]).assert_within()


# columns that leaves fill, all nodes in place or the first 64 moved there; two parts, moved
FILLED = {60: (33, 48), 76: (33, 48), 44: (17, 28)}


@pytest.mark.parametrize(
    ("mixer", "nodes"),
    [("gdn", 60), ("deltanet", 60), ("mamba2", 60), ("kda", 60), ("gdn", 76), ("kda", 44)],
)
def test_trees_of_many_inner_nodes(mixer: str, nodes: int) -> None:
    tree = grow(nodes, depth=8, seed=nodes)
    least, most = FILLED[nodes]
    assert least <= len(TreeTemplate.from_parents(tree).internal) <= most
    # moved rows that verify_qkv was given are found again by commit
    m = build(spell(tree), mixer=mixer, factors="replay" if nodes > 60 else "pku")
    r = make_round(m, batch=2, slots=3)
    live = [prune(tree, seed) for seed in (1, 2)]
    r.live = torch.tensor(live)
    last = [deepest(tree, part) for part in live]
    play(m, r, last, convolved=nodes > 60).assert_within()


def test_nodes_of_several_tiles_where_nothing_is_solved() -> None:
    # C of 70 nodes in tiles of 64 that solve reads whole, zeros above the diagonal included
    m = build("any:70", depth=9, value_heads=1, dtype=DType.FP32, factors="pku", mixer="lightning")
    tree = grow(70, depth=9, seed=70)
    play(m, make_round(m, batch=1, trees=[tree]), [deepest(tree, [True] * 70)]).assert_within()


@pytest.mark.parametrize("nodes", [100, 128, 256])
def test_many_nodes(nodes: int) -> None:
    tree = grow(nodes, depth=10, seed=nodes)
    template = spell(tree) if nodes == 100 else f"any:{nodes}"
    m = build(template, depth=10, value_heads=1, d_k=32, factors="pku")
    play(m, make_round(m, batch=1, trees=[tree]), [deepest(tree, [True] * nodes)]).assert_within()


@pytest.mark.parametrize(
    ("solver", "template", "shape"),
    [
        # levels of 1, 18, 20 and 17 nodes, all with descendants: blocks of one size
        (Solver.LEVELS, spell([-1, *[0] * 18, *range(1, 19), 1, 2, *range(19, 36), 36, 36]), {}),
        # rows of which 16 fit into shared memory, more nodes with descendants than that
        (Solver.HORNER, spell(grow(40, depth=6, seed=3)), {"d_k": 256, "dtype": DType.FP32}),
        (None, "any:130", {"d_k": 256, "dtype": DType.FP32}),
    ],
)
def test_blocks_of_columns_lie_within_tiles_of_rows(
    solver: Solver | None, template: str, shape: dict[str, Any]
) -> None:
    m = build(template, depth=6, solver=solver, value_heads=1, factors="pku", **shape)
    trees = None if m.MODULE.parents is not None else [grow(130, depth=6, seed=5)]
    play(m, make_round(m, batch=1, trees=trees), [m.MODULE.nodes - 1]).assert_within()


DEPTHS = {
    Solver.HORNER: [1, 2, 3, 7, 8, 9, 15, 16, 17],
    Solver.LEVELS: [1, 3, 8],
    Solver.SUBSTITUTION: [3, 15, 16, 17, 33],
}


@pytest.mark.parametrize(
    ("solver", "depth"), [(solver, depth) for solver, depths in DEPTHS.items() for depth in depths]
)
def test_a_chain_uses_its_whole_depth(solver: Solver, depth: int) -> None:
    m = build(f"chain:{depth}", solver=solver, value_heads=1, factors="pku", dtype=DType.FP32)
    play(m, make_round(m, batch=1), [depth]).assert_within()


@settings(max_examples=8)
@given(st.data())
def test_any_tree_with_any_live_part(data: st.DataObject) -> None:
    tree = data.draw(trees(14))
    layout = data.draw(st.sampled_from(["replay", "pku"]))
    template = data.draw(st.sampled_from(["any:14", spell_template(tree)]))
    m = build(template, depth=19, factors=layout)
    parents = list(tree.parents or ())
    r = make_round(m, batch=1, trees=[parents], seed=data.draw(st.integers(0, 99)))
    live = data.draw(live_masks(tree))
    r.live = torch.tensor([live])
    last = data.draw(st.integers(-1, len(parents)))
    play(m, r, [last]).assert_within()


def test_depth_above_what_the_tree_needs_changes_nothing() -> None:
    rounds = []
    for depth in (2, 9):
        m = build("(2,2)", depth=depth)
        r = make_round(m)
        factors = m.allocate(2, 1, "cpu")
        rounds.append(r.verify(m, factors))
    assert torch.equal(*rounds)

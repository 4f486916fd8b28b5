"""Topology given at run time: any tree, any garbage, no node reads what is not its ancestor."""

import random
from types import ModuleType

import pytest
import torch

from support.rounds import Round, build, check_commit, check_verify, make_round, poison, same_bits

LAYOUTS = ["replay", "pku"]
GARBAGE = {
    "all zeros, the root its own parent": [0, 0, 0, 0, 0, 0],
    "all orphans": [-1] * 6,
    "a cycle of two": [-1, 0, 3, 2, 3, 1],
    "a node that is its own parent": [-1, 1, 1, 2, 0, 4],
    "forward links": [-1, 5, 4, 3, 0, 4],
    "parents past the end": [-1, 0, 6, 17, 1000, 1],
    "parents past all memory": [-1, 0, 1 << 31, 1 << 40, (1 << 62) + 1, 1],
    "negative parents": [-1, 0, -5, -(1 << 31), -(1 << 62), 1],
    "parents that wrap to a node in 32 bits": [-1, 0, 1 << 32, (1 << 32) + 1, -(1 << 32), 1],
    "a root with a parent": [3, 0, 1, 2, 0, 4],
    "a chain": [-1, 0, 1, 2, 3, 4],
}


def reachable(parents: list[int], depth: int) -> list[bool]:
    """Nodes linked to the root by earlier nodes, in at most `depth` edges."""
    levels: list[int | None] = [0]
    for node in range(1, len(parents)):
        above = levels[parents[node]] if 0 <= parents[node] < node else None
        levels.append(None if above is None or above == depth else above + 1)
    return [level is not None for level in levels]


def believed(r: Round, live: list[list[bool]]) -> Round:
    """The round as its live nodes make it: what the judge may look at."""
    trees = [
        [p if alive[n] and n else min(n - 1, 0) for n, p in enumerate(tree)]
        for tree, alive in zip(r.trees, live, strict=True)
    ]
    return r.with_clones(trees=trees, live=torch.tensor(live))


def play_unchecked(m: ModuleType, r: Round, last: list[int], live: list[list[bool]]) -> None:
    """One round without argument checks, judged on the nodes that should be live."""
    factors = poison(m.allocate(len(last), 1, "cpu"))
    factors.check = False
    out = r.verify(m, factors)
    was = believed(r, live)
    worst = check_verify(m, was, out, factors)
    r.commit(m, factors, last)
    pools = (was.state, was.conv_state), (r.state, r.conv_state)
    (worst | check_commit(m, was, factors, *pools, last)).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parents", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_dead_and_harms_no_live_node(parents: list[int], layout: str) -> None:
    m = build("any:9", depth=3, factors=layout, value_heads=1)
    r = make_round(m, batch=1, trees=[parents])
    live = reachable(parents, 3)
    r.x[:, :, [not alive for alive in live]] = float("nan")
    last = max(n for n in range(6) if live[n])
    play_unchecked(m, r, [last], [live])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dead_node_of_garbage_commits_nothing(layout: str) -> None:
    m = build("any:9", depth=3, factors=layout, value_heads=1)
    for node in range(2, 5):
        r = make_round(m, batch=1, trees=[[-1, 0, 3, 2, 3, 1]])
        play_unchecked(m, r, [node], [[True, True, False, False, False, True]])


@pytest.mark.parametrize("mixer", ["gdn", "mamba2", "lightning"])
def test_random_garbage_in_every_row(mixer: str) -> None:
    m = build("any:33", depth=4, value_heads=1, mixer=mixer)
    numbers = random.Random(5)
    trees = [[numbers.randrange(-3, 36) for _ in range(33)] for _ in range(2)]
    r = make_round(m, trees=trees)
    live = [reachable(tree, 4) for tree in trees]
    r.x[0, ~torch.tensor(live)] = float("nan")
    play_unchecked(m, r, [numbers.randrange(33) for _ in range(2)], live)


def test_a_live_mask_with_holes_kills_what_hangs_below() -> None:
    m = build("any:9", depth=5, value_heads=1)
    tree = [-1, 0, 1, 2, 0, 4]
    r = make_round(m, batch=1, trees=[tree])
    r.live = torch.tensor([[True, False, True, True, True, True]])
    play_unchecked(m, r, [3], [[True, False, False, False, True, True]])


def test_a_static_module_treats_a_live_mask_with_holes_alike() -> None:
    m = build("parents:[-1,0,1,2,0,4]", value_heads=1)
    r = make_round(m, batch=1)
    r.live = torch.tensor([[True, False, True, True, True, True]])
    play_unchecked(m, r, [5], [[True, False, False, False, True, True]])


@pytest.mark.parametrize(
    ("mixer", "layout"), [*(("gdn", layout) for layout in LAYOUTS), ("mamba2", "pku")]
)
def test_too_deep_a_tree_is_refused_or_cut(mixer: str, layout: str) -> None:
    m = build("any:9", depth=3, factors=layout, value_heads=1, mixer=mixer)
    chain = list(range(-1, 5))
    r = make_round(m, batch=1, trees=[chain])
    with pytest.raises(ValueError, match=r"parents: row 0: expected depth 3 or less, got 5"):
        r.verify(m, m.allocate(1, 1, "cpu"))
    play_unchecked(m, r, [3], [[True] * 4 + [False] * 2])


REFUSED = {
    "orphan": ([-1, 0, -1], r"parents: row 1 node 2: expected a parent below 2, got -1"),
    "forward": ([-1, 2, 0], r"parents: row 1 node 1: expected a parent below 1, got 2"),
    "self": ([-1, 1, 0], r"parents: row 1 node 1: expected a parent below 1, got 1"),
    "far": (
        [-1, 0, 1 << 40],
        r"parents: row 1 node 2: expected a parent below 2, got 1099511627776",
    ),
}


@pytest.mark.parametrize(("parents", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_tree_is_refused(parents: list[int], message: str) -> None:
    m = build("any:9", depth=3, value_heads=1)
    r = make_round(m, trees=[[-1, 0, 0], parents])
    factors = poison(m.allocate(2, 1, "cpu"))
    with pytest.raises(ValueError, match=message):
        r.verify(m, factors)
    # of a padded row nothing is asked
    r.slots[1] = -1
    r.verify(m, factors)


def test_holes_in_live_are_refused() -> None:
    for template, mixer in (
        ("any:9", "gdn"),
        ("parents:[-1,0,1]", "gdn"),
        ("any:9", "mamba2"),
        ("parents:[-1,0,1]", "lightning"),
    ):
        m = build(template, depth=3, value_heads=1, mixer=mixer)
        r = make_round(m, batch=1, trees=[[-1, 0, 1]])
        r.live = torch.tensor([[True, False, True]])
        with pytest.raises(ValueError, match=r"live: row 0 node 2: expected a live parent, got"):
            r.verify(m, m.allocate(1, 1, "cpu"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_nodes_than_there_is_room_for(layout: str) -> None:
    m = build("any:64", depth=8, factors=layout, value_heads=1)
    tree = [-1, *((n - 1) // 2 for n in range(1, 17))]
    r = make_round(m, trees=[tree, list(range(-1, 8)) + [0] * 8], slots=3)
    play_unchecked(m, r, [16, 8], [[True] * 17] * 2)


def test_a_runtime_and_a_static_module_agree_within_the_contract() -> None:
    tree = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
    results = []
    for template in ("parents:[-1,0,0,1,1,2,3,3,6]", "any:9"):
        m = build(template, depth=4, value_heads=1)
        r = make_round(m, batch=1, trees=[tree])
        factors = m.allocate(1, 1, "cpu")
        r.verify(m, factors)
        r.commit(m, factors, [8])
        results.append(r)
    assert same_bits(results[0].conv_state, results[1].conv_state)
    one, other = (r.state[0, int(r.slots[0])] for r in results)
    assert torch.linalg.norm(one - other) <= 1e-5 * torch.linalg.norm(one)


def test_the_judge_itself_knows_a_tree() -> None:
    assert reachable([-1, 0, 3, 2, 3, 1], 3) == [True, True, False, False, False, True]
    assert reachable([-1, 0, 1, 2, 3], 2) == [True, True, True, False, False]

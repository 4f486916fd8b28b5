"""Trees traced on the device are what a plain walk over the links finds, whatever is in them."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bolegen_runtime import trace_links, trace_parents
from support import strategies
from support.trees import Row, links_of, walk_links, walk_parents

# garbage that engines leave, and numbers that are nodes only in 32 bits
WILD = st.sampled_from([-1, -2, -(1 << 31), (1 << 31) - 1, 1 << 32, (1 << 32) + 1, -(1 << 62)])
WILD32 = st.sampled_from([-1, -2, -(1 << 31), (1 << 31) - 1])


def places(batch: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs full of what was there before."""
    return torch.full((batch, room), 99, dtype=torch.int32), torch.ones(batch, room).bool()


def check(
    parents: torch.Tensor, live: torch.Tensor, row: int, want: tuple[Row, list[bool]]
) -> None:
    n = len(want[0])
    assert parents[row, :n].tolist() == want[0]
    assert live[row, :n].tolist() == want[1]
    assert (parents[row, n:] == -1).all()
    assert not live[row, n:].any()


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[tuple[Row, Row, int, list[bool], int]], torch.dtype]:
    """Nodes, then rows of (first, sibling, count, keep, slot): trees, some of them spoiled."""
    n = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    wild = WILD if dtype is torch.int64 else WILD32
    made = []
    for _ in range(draw(st.integers(1, 3))):
        tree = list(draw(strategies.trees(max_nodes=n, min_nodes=n)).parents or ())
        first, sibling = links_of(tree)
        for _ in range(draw(st.sampled_from([0, 0, 1, 3, 2 * n]))):
            spoiled = draw(st.sampled_from([first, sibling]))
            spoiled[draw(st.integers(0, n - 1))] = draw(st.one_of(st.integers(0, n), wild))
        keep = draw(st.sampled_from([[True] * n, [draw(st.booleans()) for _ in range(n)]]))
        made.append((first, sibling, draw(st.integers(-1, n + 2)), keep, draw(st.integers(-1, 2))))
    return n, made, dtype


@given(rows(), st.integers(0, 3), st.booleans())
def test_links_are_what_a_plain_walk_finds(
    drawn: tuple[int, list[Any], torch.dtype], more: int, masked: bool
) -> None:
    n, made, dtype = drawn
    first, sibling, counts, keep, slots = zip(*made, strict=True)
    parents, live = places(len(made), n + more)
    options: dict[str, torch.Tensor] = {}
    if masked:
        options = {"counts": torch.tensor(counts), "keep": torch.tensor(keep)}
    trace_links(
        torch.tensor(first, dtype=dtype), torch.tensor(sibling, dtype=dtype),
        torch.tensor(slots), parents, live, **options,
    )  # fmt: skip
    for row in range(len(made)):
        count = 0 if slots[row] < 0 else counts[row] if masked else n
        mask = keep[row] if masked else [True] * n
        check(parents, live, row, walk_links(first[row], sibling[row], count, mask))


@given(rows(), st.booleans())
def test_parents_are_what_a_plain_walk_finds(
    drawn: tuple[int, list[Any], torch.dtype], masked: bool
) -> None:
    n, made, dtype = drawn
    # links taken for parents are garbage of every kind
    _, sibling, counts, keep, slots = zip(*made, strict=True)
    up = [[p if p >= 0 else i - 1 for i, p in enumerate(row)] for row in sibling]
    parents, live = places(len(made), n)
    options = {"counts": torch.tensor(counts), "keep": torch.tensor(keep)} if masked else {}
    given_up = torch.tensor(up, dtype=dtype)
    trace_parents(given_up, torch.tensor(slots), parents, live, **options)
    for row in range(len(made)):
        count = 0 if slots[row] < 0 else counts[row] if masked else n
        mask = keep[row] if masked else [True] * n
        check(parents, live, row, walk_parents(up[row], count, mask))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(tree=strategies.trees(max_nodes=70))
def test_links_and_parents_of_a_tree_agree(dtype: torch.dtype, tree: Any) -> None:
    up = list(tree.parents)
    first, sibling = (torch.tensor([x], dtype=dtype) for x in links_of(up))
    slots, by_links, by_parents = torch.tensor([0]), places(1, len(up)), places(1, len(up))
    trace_links(first, sibling, slots, *by_links)
    trace_parents(torch.tensor([up], dtype=dtype), slots, *by_parents)
    for parents, live in (by_links, by_parents):
        assert parents[0].tolist() == up
        assert live.all()


TWO, THREE = [True, True, False, False, False], [True, True, True, False, False]
GARBAGE: dict[str, tuple[Row, Row, list[bool]]] = {
    "zeros, as at capture": ([0] * 5, [0] * 5, [True, False, False, False, False]),
    "a link to itself": ([1, 1, -1, -1, -1], [-1, -1, 2, -1, -1], TWO),
    "a cycle of siblings": ([1, -1, -1, -1, -1], [-1, 2, 1, -1, -1], THREE),
    "a child of two": ([1, 3, 3, -1, -1], [-1, 2, -1, 4, -1], THREE),
    "an orphan's child": ([1, -1, 3, -1, -1], [-1] * 5, TWO),
    "a sibling of the root": ([1, -1, -1, -1, -1], [2, -1, -1, -1, -1], TWO),
    "past the end": ([1, 5, 1 << 20, -7, 9], [-1, 2, 99, -1, -1], THREE),
    "an earlier sibling": (
        [2, -1, -1, -1, -1],
        [-1, -1, 1, -1, -1],
        [True, False, True, False, False],
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_dead_and_the_rest_lives(name: str) -> None:
    first, sibling, want = GARBAGE[name]
    parents, live = places(1, 5)
    trace_links(torch.tensor([first]), torch.tensor([sibling]), torch.tensor([0]), parents, live)
    assert live[0].tolist() == want
    assert all((p < 0) == (i == 0 or not want[i]) for i, p in enumerate(parents[0].tolist()))


def test_node_counts_of_each_request() -> None:
    chain = torch.arange(1, 9).repeat(4, 1)
    none = torch.full((4, 8), -1)
    parents, live = places(4, 8)
    slots, counts = torch.tensor([3, 0, 2, 1]), torch.tensor([1, 8, 1, 5], dtype=torch.int32)
    trace_links(chain, none, slots, parents, live, counts=counts)
    assert live.sum(1).tolist() == [1, 8, 1, 5]
    assert parents[1].tolist() == list(range(-1, 7))
    assert parents[3].tolist() == [-1, 0, 1, 2, 3, -1, -1, -1]


def test_padded_rows_and_no_rows() -> None:
    parents, live = places(2, 3)
    stale = torch.tensor([[1, 2, -1], [1, 2, -1]])
    trace_links(stale, torch.full((2, 3), -1), torch.tensor([-1, 7]), parents, live)
    assert parents.tolist() == [[-1, -1, -1], [-1, 0, 1]]
    assert live.tolist() == [[False] * 3, [True] * 3]
    none = torch.zeros(0, 3, dtype=torch.int64)
    parents, live = places(0, 3)
    trace_links(none, none, torch.zeros(0).long(), parents, live)
    trace_parents(none, torch.zeros(0).long(), parents, live)


def test_a_sibling_stays_where_the_one_before_it_is_not_kept() -> None:
    parents, live = places(1, 4)
    keep = torch.tensor([[True, False, True, True]])
    links = torch.tensor([[1, 3, -1, -1]]), torch.tensor([[-1, 2, -1, -1]])
    trace_links(*links, torch.tensor([0]), parents, live, keep=keep)
    assert parents.tolist() == [[-1, -1, 0, -1]]
    assert live.tolist() == [[True, False, True, False]]


def test_outputs_may_be_the_inputs_and_inputs_may_have_strides() -> None:
    tree = [-1, 0, 0, 1, 7, 3]
    wide = torch.tensor([tree, tree], dtype=torch.int32).t().contiguous().t()
    want = places(2, 6)
    trace_parents(wide, torch.tensor([0, 1]), *want)
    parents = torch.tensor([tree, tree], dtype=torch.int32)
    live = torch.ones(2, 6, dtype=torch.bool)
    trace_parents(parents, torch.tensor([0, 1]), parents, live, keep=live)
    assert torch.equal(parents, want[0])
    assert torch.equal(live, want[1])
    assert live[0].tolist() == [True, True, True, True, False, True]


def test_the_largest_tree() -> None:
    numbers = random.Random(1)
    up = [-1, *(numbers.randrange(n) for n in range(1, 512))]
    first, sibling = (torch.tensor([x]) for x in links_of(up))
    parents, live = places(1, 512)
    trace_links(first, sibling, torch.tensor([0]), parents, live)
    assert parents[0].tolist() == up
    big = torch.zeros(1, 513, dtype=torch.int32)
    with pytest.raises(ValueError, match="first_child: expected 1 to 512 nodes"):
        trace_links(big, big, torch.tensor([0]), big, big.bool())

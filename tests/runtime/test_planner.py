"""The planner: closed under parents, optimal, and defined on everything that can come in."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bolegen_runtime import cumulate, expect_tokens, plan_nodes
from support.rounds import build, make_round
from support.strategies import trees

NAN, INF = math.nan, math.inf
CHAIN = (-1, 0, 1, 2)


@dataclass
class Batch:
    """A drawn batch: every argument of plan_nodes, as lists."""

    parents: list[list[int]]
    scores: list[list[float]]
    total: int
    padded: list[bool]
    minimum: list[int]
    maximum: list[int]
    weight: list[float]
    remaining: list[int]

    @property
    def options(self) -> dict[str, torch.Tensor]:
        return {
            "slots": torch.tensor([-1 if p else 3 for p in self.padded]),
            "minimum": torch.tensor(self.minimum),
            "maximum": torch.tensor(self.maximum, dtype=torch.int32),
            "weight": torch.tensor(self.weight),
            "remaining": torch.tensor(self.remaining),
        }

    def plan(self, **changes: Any) -> torch.Tensor:
        given = {"total": self.total, **self.options, **changes}
        scores = torch.tensor(self.scores)
        return plan_nodes(scores, torch.tensor(self.parents), given.pop("total"), **given)


# few values, so that equals are common
SCORES = st.sampled_from([0.0, -0.25, -0.25, -1.0, -2.0, -7.0, 0.5, INF, -INF, NAN])


@st.composite
def batches(draw: st.DrawFn, nodes: int = 5, most_rows: int = 3) -> Batch:
    rows = draw(st.integers(1, most_rows))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    drawn = [draw(trees(max_nodes=nodes, min_nodes=nodes)).parents for _ in range(rows)]
    return Batch(
        parents=[list(tree or ()) for tree in drawn],
        scores=[draw(st.lists(SCORES, min_size=nodes, max_size=nodes)) for _ in range(rows)],
        total=draw(st.integers(-1, rows * nodes + 2)),
        padded=each(st.booleans()),
        minimum=each(st.integers(-1, nodes + 1)),
        maximum=each(st.integers(-1, nodes + 1)),
        weight=each(st.sampled_from([0.0, 0.5, 1.0, 3.0, NAN, -1.0])),
        remaining=each(st.integers(-1, nodes)),
    )


def closed_scores(scores: Sequence[float], parents: Sequence[int]) -> list[float]:
    closed = [0.0]
    for node in range(1, len(parents)):
        own = -INF if math.isnan(scores[node]) else scores[node]
        closed.append(min(own, closed[parents[node]]))
    return closed


def levels_of(parents: Sequence[int]) -> list[int]:
    levels = [0]
    for parent in parents[1:]:
        levels.append(levels[parent] + 1)
    return levels


def is_closed(live: Sequence[bool], parents: Sequence[int]) -> bool:
    return all(live[p] for keep, p in zip(live[1:], parents[1:], strict=True) if keep)


def row_sets(b: Batch, row: int) -> list[tuple[int, int, float, float]]:
    """(nodes, nodes within the minimum, their chance, worth of the set) of each allowed set."""
    if b.padded[row]:
        return [(0, 0, 0.0, 0.0)]
    parents, levels = b.parents[row], levels_of(b.parents[row])
    chances = [math.exp(s) for s in closed_scores(b.scores[row], parents)]
    weight = b.weight[row] if b.weight[row] > 0 else 0.0
    most = max(1, b.maximum[row])
    found = []
    for rest in itertools.product([False, True], repeat=len(parents) - 1):
        live = (True, *rest)
        inside = [n for n, keep in enumerate(live) if keep]
        fine = is_closed(live, parents) and len(inside) <= most
        if fine and all(chances[n] and levels[n] <= max(0, b.remaining[row]) for n in inside):
            served = min(len(inside), max(1, b.minimum[row]))
            gain = sum(chances[n] for n in inside)
            found.append((len(inside), served, gain, weight * gain))
    return found


def best(b: Batch) -> tuple[int, float]:
    """By brute force: nodes served within minima first, then the weighted sum."""
    roots = b.padded.count(False)
    total = max(b.total, roots)
    options = [row_sets(b, row) for row in range(len(b.padded))]
    reach = [max(s[1] for s in sets) for sets in options]
    results = [
        (sum(s[1] for s in combo), sum(s[3] for s in combo))
        for combo in itertools.product(*options)
        if sum(s[0] for s in combo) <= total
    ]
    served = max(r[0] for r in results)
    assert served == min(total, sum(reach))
    return served, max(r[1] for r in results if r[0] == served)


@given(batches())
def test_a_plan_is_closed_and_no_allowed_plan_is_worth_more(b: Batch) -> None:
    live = b.plan()
    served, worth, count = 0, 0.0, 0
    for row, keep in enumerate(live.tolist()):
        assert any(keep) != b.padded[row]
        if b.padded[row]:
            continue
        assert is_closed(keep, b.parents[row])
        chances = [math.exp(s) for s in closed_scores(b.scores[row], b.parents[row])]
        gain = sum(c for c, k in zip(chances, keep, strict=True) if k)
        matches = [s for s in row_sets(b, row) if s[0] == sum(keep) and math.isclose(s[2], gain)]
        assert matches, "not an allowed set"
        served, worth = served + matches[0][1], worth + matches[0][3]
        count += sum(keep)
    assert count <= max(b.total, b.padded.count(False))
    want_served, want_worth = best(b)
    assert served == want_served
    assert worth == pytest.approx(want_worth, rel=1e-5, abs=1e-6)


@given(batches(nodes=12, most_rows=4))
def test_padded_rows_change_nothing(b: Batch) -> None:
    full = b.plan()
    kept = [row for row, padded in enumerate(b.padded) if not padded]
    fields: dict[str, Any] = {
        name: [value[row] for row in kept] if isinstance(value, list) else value
        for name, value in vars(b).items()
    }
    alone = Batch(**fields)
    if kept:
        assert torch.equal(full[kept], alone.plan())
    garbage = Batch(**vars(b))
    garbage.scores = [
        [NAN if n % 2 else INF] * 12 if padded else row
        for n, (padded, row) in enumerate(zip(b.padded, b.scores, strict=True))
    ]
    garbage.parents = [
        [2**31 - 1] * 12 if padded else row
        for padded, row in zip(b.padded, b.parents, strict=True)
    ]
    assert torch.equal(full, garbage.plan())


@given(batches(nodes=9))
def test_a_plan_repeats_and_takes_its_total_from_the_device_too(b: Batch) -> None:
    live = b.plan()
    assert torch.equal(live, b.plan())
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(live, b.plan(total=torch.tensor([b.total], dtype=dtype)))


@given(batches(nodes=9, most_rows=1))
def test_one_tree_is_the_same_as_a_tuple_a_vector_and_a_matrix(b: Batch) -> None:
    scores, tree = torch.tensor(b.scores), b.parents[0]
    plans = [
        plan_nodes(scores, parents, b.total)
        for parents in (tuple(tree), torch.tensor(tree, dtype=torch.int32), torch.tensor([tree]))
    ]
    assert torch.equal(plans[0], plans[1])
    assert torch.equal(plans[0], plans[2])


@given(batches(nodes=7), st.integers(0, 6))
def test_a_larger_total_keeps_what_a_smaller_one_chose(b: Batch, more: int) -> None:
    assert not (b.plan() & ~b.plan(total=b.total + more)).any()


def plan(scores: list[list[float]], parents: Any, total: Any, **options: Any) -> list[list[int]]:
    """Live nodes of each row."""
    live = plan_nodes(torch.tensor(scores, dtype=torch.float32), parents, total, **options)
    return [[n for n, keep in enumerate(row) if keep] for row in live.tolist()]


def test_the_total_goes_to_the_likeliest_nodes_of_all_requests() -> None:
    scores = [[0, -0.1, -0.2, -0.3], [0, -1.0, -1.1, -5.0]]
    assert plan(scores, CHAIN, 5) == [[0, 1, 2, 3], [0]]
    assert plan(scores, CHAIN, 6) == [[0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize("total", [-3, 0, 1, 2])
def test_roots_are_verified_whatever_the_total(total: int) -> None:
    assert plan([[0, -0.1], [0, -0.1]], (-1, 0), total) == [[0], [0]]


def test_a_total_beyond_all_nodes_takes_all_that_hold_a_draft() -> None:
    assert plan([[0, -9, -INF, -1], [0, NAN, -1, -2]], (-1, 0, 0, 1), 99) == [[0, 1, 3], [0, 2]]


def test_nothing_below_an_empty_node_lives() -> None:
    assert plan([[0, NAN, 0, 0]], CHAIN, 9) == [[0]]
    assert plan([[0, -1, -INF, 0]], CHAIN, 9) == [[0, 1]]


def test_equals_are_taken_parents_first_then_by_row() -> None:
    same = [[0.0] * 4] * 2
    assert plan(same, CHAIN, 3) == [[0, 1], [0]]
    assert plan(same, CHAIN, 5) == [[0, 1, 2], [0, 1]]
    # -0.0 is 0.0
    assert plan([[0, -0.0, 0.0, 0.0]], (-1, 0, 0, 0), 2) == [[0, 1]]


def test_infinite_scores_count_as_their_parents() -> None:
    assert plan([[0, -3, INF, -4], [0, -3.5, -3.6, -9]], CHAIN, 5) == [[0, 1, 2], [0, 1]]
    assert plan([[-INF, -1.0]], (-1, 0), 2) == [[0, 1]]  # a root's own score is not looked at


@pytest.mark.parametrize(
    ("remaining", "deepest"), [(-2, 0), (0, 0), (1, 1), (2, 2), (3, 3), (9, 3)]
)
def test_no_node_is_deeper_than_what_remains(remaining: int, deepest: int) -> None:
    want = [list(range(deepest + 1))]
    assert plan([[0, -1, -2, -3]], CHAIN, 9, remaining=remaining) == want
    assert plan([[0, -1, -2, -3]], CHAIN, 9, remaining=torch.tensor([remaining])) == want


def test_minimum_comes_first_and_maximum_has_the_last_word() -> None:
    scores = [[0, -0.1, -0.2, -0.3], [0, -5.0, -6.0, -7.0]]
    assert plan(scores, CHAIN, 5, minimum=torch.tensor([0, 3])) == [[0, 1], [0, 1, 2]]
    assert plan(scores, CHAIN, 9, maximum=2) == [[0, 1], [0, 1]]
    assert plan(scores, CHAIN, 9, minimum=4, maximum=torch.tensor([0, 2])) == [[0], [0, 1]]
    # 8 are promised, 5 are there: the likeliest of those promised
    assert plan(scores, CHAIN, 5, minimum=4) == [[0, 1, 2, 3], [0]]


def test_weights_say_whose_tokens_are_worth_more() -> None:
    scores = [[0, -1.0, -2.0], [0, -1.5, -2.5]]
    for weight, want in (
        ([1.0, 1.0], [[0, 1], [0]]),
        ([1.0, 5.0], [[0], [0, 1]]),
        ([0.0, 0.0], [[0], [0]]),
        ([NAN, 1.0], [[0], [0, 1]]),
        ([INF, 1.0], [[0, 1], [0]]),
    ):
        assert plan(scores, (-1, 0, 0), 3, weight=torch.tensor(weight)) == want
    # whatever it is worth, a request's own nodes keep their order
    priceless = torch.tensor([INF])
    assert plan([[0, -2.0, -1.0]], (-1, 0, 0), 2, weight=priceless) == [[0, 2]]
    # a worthless request still has its minimum, its likeliest node
    lean = torch.tensor([0.0])
    assert plan([[0, -2.0, -1.0]], (-1, 0, 0), 3, weight=lean, minimum=2) == [[0, 2]]


@pytest.mark.parametrize(
    "links",
    [
        [9, 5, 5, 2, -7, 2**31 - 1],  # forward, itself, out of range, negative
        [0, 0, 3, 2, 4, -(2**31)],  # circles
    ],
)
def test_garbage_links_are_dead_and_read_by_nobody(links: list[int]) -> None:
    live = plan_nodes(torch.zeros(1, 6), torch.tensor([links]), 99)[0].tolist()
    for node in range(1, 6):
        valid = 0 <= links[node] < node
        assert live[node] == (valid and live[links[node]])
    assert live[0]


def test_verify_takes_a_plan_as_it_is() -> None:
    m = build("any:6", depth=5)
    trees = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 2, 2]]
    r = make_round(m, batch=3, slots=4, trees=trees)
    r.slots[1] = -1
    assert r.parents is not None
    log_probs = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)).log()
    r.live = plan_nodes(cumulate(log_probs, r.parents), r.parents, 7, slots=r.slots)
    out = r.verify(m, m.allocate(3, 1, "cpu"), 0)  # raises where live is not closed
    assert torch.equal(out.float().flatten(2).abs().sum(-1) > 0, r.live)
    assert int(r.live.sum()) == 7


def test_links_of_zeros_hang_below_the_root() -> None:
    zeros = torch.zeros(2, 4, dtype=torch.int32)
    assert plan([[0, -1, -2, -3]] * 2, zeros, 99) == [[0, 1, 2, 3]] * 2


def test_no_request_is_no_plan() -> None:
    live = plan_nodes(torch.zeros(0, 7), torch.zeros(0, 7, dtype=torch.int64), 5)
    assert (live.shape, live.dtype) == ((0, 7), torch.bool)


def test_cumulative_scores_are_sums_along_the_path() -> None:
    parents = (-1, 0, 0, 1, 3)
    log_probs = torch.tensor([[-8.0, -0.5, -0.25, -1.0, -2.0]])
    assert cumulate(log_probs, parents).tolist() == [[0.0, -0.5, -0.25, -1.5, -3.5]]
    odd = torch.tensor([[NAN, 3.0, NAN, -1.0, -INF]])
    assert cumulate(odd, parents).tolist() == [[0.0, 0.0, -INF, -1.0, -INF]]


@given(trees(max_nodes=40, min_nodes=40), st.integers(0, 2**16))
def test_cumulating_and_planning_agree_with_a_walk(tree: Any, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    log_probs = torch.rand(1, 40, generator=gen).log()
    walked = [0.0]
    for node in range(1, 40):
        walked.append(walked[tree.parents[node]] + float(log_probs[0, node]))
    assert cumulate(log_probs, tree.parents)[0].tolist() == pytest.approx(walked, rel=1e-5)
    live = plan_nodes(cumulate(log_probs, tree.parents), tree.parents, 11)[0].tolist()
    assert sum(live) == 11
    assert is_closed(live, tree.parents)


def test_expected_tokens_add_up_over_live_nodes() -> None:
    scores = torch.tensor([[0, math.log(0.5), math.log(0.25)], [0, -1.0, -1.0]])
    live = torch.tensor([[True, True, True], [False, False, False]])
    assert expect_tokens(scores, (-1, 0, 1), live).tolist() == pytest.approx([1.75, 0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_any_width_give_plans(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0, -1, -2, -4], [0, -3, -8, -9]], dtype=dtype)
    assert torch.equal(plan_nodes(scores, CHAIN, 5), plan_nodes(scores.float(), CHAIN, 5))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("scores", {"scores": torch.zeros(4)}),
        ("scores", {"scores": torch.zeros(2, 0)}),
        ("scores", {"scores": torch.zeros(2, 4, dtype=torch.int64)}),
        ("parents", {"parents": (-1, 0)}),
        ("parents", {"parents": torch.zeros(2, 3, dtype=torch.int32)}),
        ("parents", {"parents": torch.zeros(2, 4)}),
        ("parents", {"parents": torch.zeros(2, 4, dtype=torch.int32, device="meta")}),
        ("total", {"total": torch.zeros(2, dtype=torch.int64)}),
        ("total", {"total": torch.tensor(2.0)}),
        ("slots", {"slots": torch.zeros(3, dtype=torch.int64)}),
        ("slots", {"slots": torch.zeros(2)}),
        ("minimum", {"minimum": torch.zeros(2, 1, dtype=torch.int64)}),
        ("maximum", {"maximum": torch.zeros(2)}),
        ("weight", {"weight": torch.zeros(2, dtype=torch.int64)}),
        ("remaining", {"remaining": torch.zeros(1, dtype=torch.int64)}),
    ],
)
def test_a_wrong_argument_is_named(name: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"scores": torch.zeros(2, 4), "parents": CHAIN, "total": 3}
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        plan_nodes(**(arguments | changes))

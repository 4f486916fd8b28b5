"""The other systems' rules, against loops that follow their descriptions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bolegen_runtime import plan_fixed_width, plan_nodes, plan_per_request

NODES = 8
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 6)


def draw_scores(seed: int, rows: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    log_probs = torch.rand(rows, NODES, generator=gen).log()
    for node in range(1, NODES):
        log_probs[:, node] += log_probs[:, PARENTS[node]] * (PARENTS[node] > 0)
    log_probs[:, 0] = 0
    return log_probs


def ranked(row: torch.Tensor) -> list[int]:
    return sorted(range(NODES), key=lambda n: (-float(row[n]), n))


@given(st.integers(0, 999), st.integers(1, 4), st.integers(-1, NODES + 2))
def test_a_fixed_width_is_the_same_for_all(seed: int, rows: int, width: int) -> None:
    scores = draw_scores(seed, rows)
    live = plan_fixed_width(scores, PARENTS, width)
    for row, keep in zip(scores, live.tolist(), strict=True):
        assert {n for n in range(NODES) if keep[n]} == set(ranked(row)[: max(1, width)])


def adaserve(
    scores: torch.Tensor, total: int, required: list[float], padded: list[bool], limit: int
) -> list[set[int]]:
    """The two phases, node by node."""
    chosen: list[set[int]] = [set() if p else {0} for p in padded]
    left = total - sum(map(len, chosen))
    for row in sorted(range(len(required)), key=lambda r: -required[r]):
        if padded[row]:
            continue
        gained = 1.0
        for node in ranked(scores[row])[1:]:
            if gained >= required[row] or len(chosen[row]) >= limit or left <= 0:
                break
            chosen[row].add(node)
            gained, left = gained + math.exp(scores[row, node]), left - 1
    others = [
        (-float(scores[r, n]), n, r)
        for r in range(len(required))
        for n in range(NODES)
        if not padded[r] and n not in chosen[r]
    ]
    for _, node, row in sorted(others)[: max(0, left)]:
        chosen[row].add(node)
    return chosen


@given(
    st.integers(0, 999),
    st.integers(0, 4 * NODES + 2),
    st.lists(st.sampled_from([0.0, 1.0, 1.6, 2.1, 9.0]), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(1, NODES),
)
def test_per_request_selection_follows_its_two_phases(
    seed: int, total: int, required: list[float], padded: list[bool], limit: int
) -> None:
    scores = draw_scores(seed, 4)
    live = plan_per_request(
        scores, PARENTS, total, torch.tensor(required), limit=limit,
        slots=torch.tensor([-1 if p else 0 for p in padded]),
    )  # fmt: skip
    found = [{n for n in range(NODES) if keep[n]} for keep in live.tolist()]
    assert found == adaserve(scores, total, required, padded, limit)


def test_without_requirements_it_is_our_own_rule() -> None:
    scores = draw_scores(3, 4)
    for total in range(2, 4 * NODES):
        live = plan_per_request(scores, PARENTS, total, torch.zeros(4))
        assert torch.equal(live, plan_nodes(scores, PARENTS, total))


def test_a_wrong_requirement_is_named() -> None:
    with pytest.raises(ValueError, match=r"required: expected shape \(4,\)"):
        plan_per_request(draw_scores(1, 4), PARENTS, 9, torch.zeros(3))
    with pytest.raises(ValueError, match="scores: expected"):
        plan_per_request(torch.zeros(4), PARENTS, 9, torch.zeros(4))


def test_no_request_is_no_plan() -> None:
    none = torch.zeros(0, NODES)
    assert plan_fixed_width(none, PARENTS, 3).shape == (0, NODES)
    assert plan_per_request(none, PARENTS, 9, torch.zeros(0)).shape == (0, NODES)

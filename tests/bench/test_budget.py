"""The simulation follows the recorded text, and its recording is the real model's."""

from pathlib import Path

import pytest
import torch

from benchmarks.budget import EVERY, POLICIES, Recording, Situation, simulate
from benchmarks.pages import fill, table
from bolegen_runtime import plan_nodes
from examples.tree_decoding.record import Round, read_rounds

PARENTS = (-1, 0, 0, 1)


def recording(paths: list[tuple[int, ...]], chances: tuple[float, ...]) -> Recording:
    rounds = tuple(Round(0, (0,) * 4, chances, path, 0) for path in paths)
    return Recording("drawn", PARENTS, (rounds,))


def test_a_round_gains_the_live_part_of_its_path_and_the_next_starts_there() -> None:
    # positions 0 and 3 are visited where all nodes live, then the end
    made = recording([(0, 1, 3), (0,), (0,), (0, 2), (0,)], (1.0, 0.5, 0.4, 0.3))
    whole = simulate(made, POLICIES["batch-wide"], batch=1, width=4, seed=0)
    assert (whole.steps, whole.nodes, whole.tokens) == (2, 8, 5)
    assert whole.expected == pytest.approx(2 * (1 + 0.5 + 0.4 + 0.15))
    # two nodes: the root and node 1, so that positions 0, 2, 3 and 4 are visited
    two = simulate(made, POLICIES["fixed width"], batch=1, width=2, seed=0)
    assert (two.steps, two.nodes, two.tokens) == (4, 8, 5)
    assert two.record()["per_node"] == 5 / 8
    # roots alone are plain decoding
    alone = simulate(made, POLICIES["batch-wide"], batch=1, width=1, seed=0)
    assert (alone.steps, alone.tokens, alone.record()["mean_pace"]) == (5, 5, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_spends_the_same_total(policy: str) -> None:
    scores = torch.tensor([[0, -0.1, -2.0, -0.2], [0, -1.0, -1.5, -3.0]])
    for width in (1, 2, 3, 4):
        situation = Situation(
            scores,
            PARENTS,
            width,
            rounds=torch.tensor([3.0, 9.0]),
            tokens=torch.tensor([9.0, 9.0]),
        )
        assert int(POLICIES[policy](situation).sum()) == 2 * width


def test_a_request_that_is_behind_comes_first_by_pace() -> None:
    scores = torch.tensor([[0, -0.1, -2.0, -0.2], [0, -1.0, -1.5, -3.0]])
    behind = Situation(
        scores, PARENTS, 2, rounds=torch.tensor([3.0, 9.0]), tokens=torch.tensor([9.0, 9.0])
    )
    assert POLICIES["batch-wide"](behind).sum(1).tolist() == [3, 1]
    assert POLICIES["AdaServe, pace 2"](behind).sum(1).tolist() == [1, 3]


def test_other_recordings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3x3x3\.jsonl: its rounds stand where paths ended"):
        Recording.read(EVERY.parent / "small-hybrid-3x3x3.jsonl")


def test_batch_wide_gains_more_than_a_fixed_width_where_nodes_are_few() -> None:
    made = Recording.read(EVERY)
    some = Recording(made.name, made.parents, made.prompts[:12])
    for width in (2, 3, 4):
        ours, fixed = (
            simulate(some, POLICIES[name], batch=6, width=width, seed=1)
            for name in ("batch-wide", "fixed width")
        )
        assert ours.tokens / ours.nodes > 1.02 * fixed.tokens / fixed.nodes


def test_the_whole_tree_decodes_as_the_recorded_run_did() -> None:
    """With every node live, steps are the accepted lengths that verifying would give."""
    made = Recording.read(EVERY)
    for rounds in made.prompts[:4]:
        at, lengths = 0, []
        while at < len(rounds):
            lengths.append(rounds[at].accepted)
            at += rounds[at].accepted
        one = Recording(made.name, made.parents, (rounds,))
        every = simulate(
            one, lambda s: plan_nodes(s.scores, s.parents, 999), batch=1, width=1, seed=0
        )
        assert (every.steps, every.tokens) == (len(lengths), sum(lengths))


def test_both_recordings_hold_the_same_text() -> None:
    """Token by token, as far as both go: one decoded by trees, the other plainly."""
    _, walked = read_rounds(EVERY.parent / "small-hybrid-3x3x3.jsonl")
    _, every = read_rounds(EVERY)
    plain = {(p, i): r.tokens[0] for p in range(32) for i, r in enumerate(
        [r for r in every if r.prompt == p])}  # fmt: skip
    at = dict.fromkeys(range(32), 0)
    compared = 0
    for item in walked:
        known = plain.get((item.prompt, at[item.prompt]))
        at[item.prompt] += item.accepted
        if known is not None:
            compared += 1
            assert item.tokens[0] == known
    assert compared > 200


def test_a_page_keeps_what_is_around_its_tables(tmp_path: Path) -> None:
    page = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n"
    filled = fill(page, "a", table(["x"], [["1"]]))
    assert (
        filled == "before\n<!-- a: begin -->\n\n| x |\n| --- |\n| 1 |\n\n<!-- a: end -->\nafter\n"
    )
    assert fill(filled, "a", table(["x"], [["1"]])) == filled
    with pytest.raises(ValueError, match="expected the lines <!-- b: begin -->"):
        fill(page, "b", "")

"""The real-model example, on a tiny model with random weights."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from bolegen.ir import TreeTemplate, parse_template
from examples.train_model import CONFIG
from examples.tree_decoding.decode import accept, decode_plainly, decode_trees, find_differences
from examples.tree_decoding.drafts import Draft, MtpDrafter, NgramDrafter
from examples.tree_decoding.model import Model, build
from examples.tree_decoding.positions import record_positions
from examples.tree_decoding.record import Round, read_rounds, write_rounds
from examples.tree_decoding.run import compile_tree
from examples.tree_decoding.sequence import initialise
from examples.tree_decoding.target import TreeTarget, ancestor_mask

TINY = {
    **CONFIG,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PROMPT = (5, 9, 5, 9, 33, 17, 5, 9, 41)
TEMPLATE = "(2,2)"


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(3)
    model = build(TINY)
    initialise(model)
    for part in (model.target, model.head):
        part.eval().requires_grad_(False)
    model.target.lm_head.weight.data.mul_(20)  # clear leads, so that greedy text is no loop
    return model


@pytest.fixture(scope="module")
def module(model: Model) -> Any:
    return compile_tree(model, TEMPLATE, "fp32")


class Oracle:
    """Drafts the text it was given, in the last child of every node, and noise beside it."""

    def __init__(self, tree: TreeTemplate, text: Sequence[int]) -> None:
        self.tree, self.text, self.at = tree, text, -len(PROMPT)

    def observe(self, tokens: Sequence[int], hidden: Tensor) -> None:
        self.at += len(tokens)

    def draft(self, root: int) -> Draft:
        assert self.text[self.at] == root
        tokens = [root]
        for node in range(1, self.tree.nodes):
            siblings = self.tree.children[self.tree.parents[node]] if self.tree.parents else ()
            right = self.text[self.at + self.tree.levels[node]]
            tokens.append(right if node == siblings[-1] else (right + node) % 64)
        return Draft(tuple(tokens), (1.0,) * self.tree.nodes)


@pytest.mark.parametrize("text", ["(3,2)", "chain:3", "parents:[-1,0,1,0,3,3]"])
def test_a_mask_row_shows_the_path_and_nothing_else(text: str) -> None:
    tree = parse_template(text)
    mask = ancestor_mask(tree)
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == [
        set(tree.path(node)) for node in range(tree.nodes)
    ]


def test_acceptance_follows_the_targets_choices_through_live_nodes() -> None:
    tree = parse_template("(2,2)")
    tokens = (1, 2, 3, 4, 5, 6, 7)
    draft = Draft(tokens, (1.0,) * 7)
    assert accept(tree, draft, [3, 0, 6, 0, 0, 9, 0]) == (0, 2, 5)
    assert accept(tree, draft, [8, 4, 6, 0, 0, 9, 0]) == (0,)
    dead = dataclasses.replace(draft, probabilities=(1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.5))
    assert accept(tree, dead, [3, 0, 6, 0, 0, 9, 0]) == (0, 2)


def test_ngrams_draft_what_followed_before() -> None:
    drafter = NgramDrafter(parse_template("chain:3"))
    drafter.observe([1, 2, 3, 4, 1, 2, 3, 4, 1])
    assert drafter.draft(2).tokens == (2, 3, 4, 1)


def test_ngram_drafts_are_distinct_prefix_closed_and_sum_below_one() -> None:
    numbers = random.Random(0)
    tree = parse_template("(3,2,2)")
    drafter = NgramDrafter(tree)
    drafter.observe([numbers.randrange(6) for _ in range(60)])
    for root in (*range(6), 63):
        draft = drafter.draft(root)
        for node, children in enumerate(tree.children):
            live = [child for child in children if draft.live[child]]
            assert draft.live[node] or not live
            assert len({draft.tokens[child] for child in live}) == len(live)
            assert sum(draft.probabilities[child] for child in children) <= 1
    assert not any(drafter.draft(63).live[1:])


def test_the_head_drafts_in_a_tree_what_it_drafts_along_each_path(model: Model) -> None:
    """A chain template has no siblings to hide, so it must give every path's probabilities."""
    hidden = model.target.model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]
    tree = parse_template("(3,2,2)")

    def drafter(tree: TreeTemplate) -> MtpDrafter:
        result = MtpDrafter(model, tree, capacity=64)
        # in two parts, as after a round
        result.observe(PROMPT[:6], hidden[:6])
        result.draft(PROMPT[6])
        result.observe(PROMPT[6:], hidden[6:])
        return result

    draft = drafter(tree).draft(7)
    first = drafter(parse_template("chain:3")).draft(7)
    leaf = tree.children[tree.children[1][0]][0]
    path = tree.path(leaf)
    assert [draft.tokens[node] for node in path] == list(first.tokens)
    probabilities = torch.tensor([draft.probabilities[node] for node in path])
    torch.testing.assert_close(probabilities, torch.tensor(first.probabilities))
    for children in tree.children:
        values = [draft.probabilities[child] for child in children]
        assert values == sorted(values, reverse=True)
        assert sum(values) <= 1 + 1e-6


def test_a_tree_pass_gives_every_node_what_its_path_gives(model: Model, module: Any) -> None:
    target = TreeTarget(model, module, capacity=64)
    target.prefill(PROMPT)
    tokens = torch.arange(20, 20 + target.tree.nodes)
    live = torch.ones(target.tree.nodes, dtype=torch.bool)
    text = list(PROMPT)
    for path in ((0, 2, 6), (0,), (0, 1)):
        hidden = target.verify(tokens, live)
        for node in range(target.tree.nodes):
            ids = torch.tensor([[*text, *tokens[list(target.tree.path(node))].tolist()]])
            plain = model.target.model(input_ids=ids).last_hidden_state[0, -1]
            torch.testing.assert_close(hidden[node], plain, rtol=2e-5, atol=2e-5)
        target.commit(path)
        text += tokens[list(path)].tolist()
        assert target.length == len(text)


def test_trees_decode_what_plain_decoding_does(model: Model, module: Any) -> None:
    plain = decode_plainly(model, PROMPT, 16)
    assert len(set(plain)) > 3
    target = TreeTarget(model, module, capacity=64)
    text, rounds = decode_trees(target, Oracle(target.tree, plain), PROMPT, 10)
    assert text == plain[:10]
    assert [item.path for item in rounds] == [(0, 2, 6)] * 3
    for drafter in (
        MtpDrafter(model, target.tree, capacity=64),
        NgramDrafter(target.tree),
    ):
        target = TreeTarget(model, module, capacity=64)
        text, rounds = decode_trees(target, drafter, PROMPT, 6)
        assert text == plain[:6]
        assert [item.tokens[0] for item in rounds[1:]] == [item.next for item in rounds[:-1]]


def test_a_changed_token_is_found_with_the_lead_of_the_plain_choice(model: Model) -> None:
    plain = decode_plainly(model, PROMPT, 6)
    assert find_differences(model, PROMPT, plain) == []
    changed = [*plain[:5], (plain[5] + 1) % 64]
    (found,) = find_differences(model, PROMPT, changed, index=4)
    assert (found.prompt, found.at, found.chosen, found.plain) == (4, 5, changed[5], plain[5])
    assert found.lead > 0


def test_a_recording_comes_back(tmp_path: Path) -> None:
    rounds = [Round(0, (4, 5, 6), (1.0, 0.25, 0.0), (0, 1), 9)]
    write_rounds(tmp_path / "rounds.jsonl", {"parents": [-1, 0, 0]}, rounds)
    run, again = read_rounds(tmp_path / "rounds.jsonl")
    assert (run["parents"], again) == ([-1, 0, 0], rounds)
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(ValueError, match="no recording"):
        read_rounds(tmp_path / "other")


def test_positions_hold_the_trees_and_paths_of_tree_decoding(model: Model, module: Any) -> None:
    target = TreeTarget(model, module, capacity=64)
    drafter = MtpDrafter(model, target.tree, capacity=64)
    text, walked = decode_trees(target, drafter, PROMPT, 8)
    every = record_positions(model, target.tree, PROMPT, 8)
    assert [item.tokens[0] for item in every] == text
    at = 0
    for item in walked:
        if at >= len(every):
            break
        there = every[at]
        assert (there.tokens, there.path, there.next) == (item.tokens, item.path, item.next)
        assert there.probabilities == pytest.approx(item.probabilities, rel=1e-3)
        at += item.accepted
    assert at >= 7  # all of the text but its first token comes from rounds

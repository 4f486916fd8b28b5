"""What is shipped beside the examples: the recording and the small model."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bolegen.ir import TreeTemplate, parse_template
from examples.tree_decoding.record import read_rounds

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_recording_tells_one_consistent_story() -> None:
    run, rounds = read_rounds(EXAMPLES / "recordings" / "small-hybrid-3x3x3.jsonl")
    tree = TreeTemplate.from_parents(run["parents"])
    assert tree == parse_template(run["template"])
    assert len(rounds) > 300
    for item in rounds:
        assert len(item.tokens) == len(item.probabilities) == tree.nodes
        assert item.path == tree.path(item.path[-1])
        children = tree.children[item.path[-1]]
        assert item.next not in [item.tokens[child] for child in children]
        for siblings in tree.children:
            assert sum(item.probabilities[child] for child in siblings) <= 1 + 1e-3
    for before, after in pairwise(rounds):
        assert before.prompt != after.prompt or before.next == after.tokens[0]


def test_the_small_model_is_small_and_what_the_script_trains() -> None:
    pytest.importorskip("transformers")
    from examples.train_model import CONFIG

    folder = EXAMPLES / "small-hybrid"
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    assert (folder / "model.safetensors").stat().st_size <= 6_000_000

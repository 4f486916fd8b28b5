"""The training script: its whole-sequence pass, and a trial run from text to checkpoint."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from examples import train_model
from examples.tree_decoding.decode import decode_plainly
from examples.tree_decoding.model import build, load
from examples.tree_decoding.sequence import initialise, run_target


def test_the_differentiable_pass_is_transformers_own() -> None:
    torch.manual_seed(0)
    model = build(train_model.CONFIG)
    initialise(model)
    ids = torch.randint(2048, (2, 128))
    with torch.no_grad():
        own = model.target.model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(run_target(model, ids), own, rtol=1e-4, atol=1e-4)


def test_a_trial_run_leaves_a_checkpoint_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(Path(train_model.__file__).parent)
    options = ["--text", source, "--max-steps", "1", "--batch", "1", "--length", "64"]
    monkeypatch.setattr(sys, "argv", ["train_model", str(tmp_path / "out"), *options])
    train_model.main()
    assert json.loads((tmp_path / "out" / "training.json").read_text())["steps"] == 1
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 6_000_000
    model = load(tmp_path / "out", dtype=torch.float32, device="cpu")
    assert len(decode_plainly(model, model.prompts[0], 2)) == 2


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        load(tmp_path, dtype=torch.float32, device="cpu")

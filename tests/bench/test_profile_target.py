"""The wiring of the target that is profiled, at a size that the interpreter runs."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.hybrid_target import HybridTarget, attend, heap_tree
from benchmarks.pages import fill
from benchmarks.profile_target import (
    check_attention,
    check_decode,
    describe_target,
    recheck,
    show,
)
from benchmarks.target_model import fuse_norms
from bolegen_runtime import Pass, Settings, load, profile_target
from support.tiny_target import SHAPES, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target() -> HybridTarget:
    modules = {n: load(f"any:{n}", depth=2, settings=Settings(), **SHAPES) for n in (1, 3)}
    model = fuse_norms(tiny_model(torch.bfloat16))
    return HybridTarget(model, modules, batch=2, context=8)


def test_decode_kernels_agree_with_verify_and_commit(target: HybridTarget) -> None:
    for module in target.modules.values():
        assert check_decode(target, module) <= 1


@pytest.mark.parametrize("length", [8, 2048])
def test_attention_agrees_with_its_definition(length: int) -> None:
    assert check_attention("cpu", length=length, dim=16) <= 1


def test_a_node_sees_its_ancestors_and_no_sibling() -> None:
    q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
    keys, values = (torch.randn(1, 2, 4, 8) for _ in range(2))
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    out = attend(q, k, v, keys, values, sees)
    k[:, :, 1], v[:, :, 1] = 9, 9
    other = attend(q, k, v, keys, values, sees)
    assert torch.equal(out[:, :, [0, 2]], other[:, :, [0, 2]])
    assert not torch.equal(out[:, :, 1], other[:, :, 1])


def test_a_tree_of_one_node_is_one_token_decode(target: HybridTarget) -> None:
    states, windows = target.states.clone(), target.windows.clone()
    tokens, logits = torch.tensor([[7], [9]]), []
    for template in (None, "any:64"):
        target.states.copy_(states)
        target.windows.copy_(windows)
        logits.append(target.run(tokens, target.place(Pass(2, 8, template, 2))))
        assert not torch.equal(target.states, states)
        assert not torch.equal(target.windows, windows)
    assert logits[0].shape == (2, 1, 40)
    torch.testing.assert_close(logits[0], logits[1], atol=0.02, rtol=0.02)


def test_a_profile_of_it_has_every_column(target: HybridTarget) -> None:
    def clock(run: Callable[[], object]) -> list[float]:
        start = time.perf_counter()
        run()
        return [1e3 * (time.perf_counter() - start)] * 2

    profile = profile_target(
        target.prepare, batches=(1, 2), contexts=(8,), templates={"any:64": (1, 3)},
        clock=clock, device="cpu", target=describe_target(target), epsilon=0.5,
    )  # fmt: skip
    assert [e.totals for e in profile.entries] == [(1, 3), (2, 6)]
    assert profile.target["class"] == "Qwen3_5ForCausalLM(Qwen3_5TextConfig)"
    page = show(profile, recheck(target.prepare, profile, clock))
    assert page.count("\n") == 6
    assert statistics.median(profile.entries[1].median_ms) > 0
    assert page in fill("<!-- profile: begin -->\n<!-- profile: end -->", "profile", page)


def test_too_many_nodes_are_refused(target: HybridTarget) -> None:
    with pytest.raises(ValueError, match="expected at most 3, got 4"):
        target.prepare(Pass(1, 8, "any:64", 4))
    assert heap_tree(6) == [-1, 0, 0, 1, 1, 2]


def test_without_transformers_the_script_says_so() -> None:
    blocked = "import runpy, sys; sys.modules['transformers'] = None; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", blocked, str(ROOT / "benchmarks/profile_target.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("profile_target: the target is transformers' Qwen3.5 and")
    assert "pip install '.[hf]'" in done.stderr

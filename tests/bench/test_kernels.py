"""What a target pass is made of, what the probe tells, and whose shapes a model has."""

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import kernels, probe, shapes
from support.offline_engine import LAYERS, SERIAL, trace


@pytest.mark.parametrize("shape", ["4b", "9b", "27b"])
def test_shapes_are_those_of_the_model(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bolegen.models import find_model

    folder = tmp_path / f"m_{shape}"
    words = ["shapes.py", str(folder), shape, "--positions", "65536"]
    monkeypatch.setattr(sys, "argv", words)
    shapes.main()
    model, config = (
        find_model(f"qwen3.5-{shape}"),
        json.loads((folder / "config.json").read_text()),
    )
    assert config["linear_num_value_heads"] == model.value_heads
    assert config["linear_num_key_heads"] == model.key_heads
    assert config["max_position_embeddings"] == 65536
    found = shapes.describe_model(folder)
    assert (found["name"], found["linear_layers"]) == (shape, model.layers)
    # K and V of 4 heads of 256 in bfloat16, in every fourth layer
    assert found["kv_bytes"] == 4096 * model.layers // 3
    monkeypatch.setattr(sys, "argv", [*words, "--layers", "8"])
    shapes.main()
    assert shapes.describe_model(folder)["linear_layers"] == 6
    monkeypatch.setattr(sys, "argv", [*words, "--layers", "6"])
    with pytest.raises(ValueError, match="multiple of 4"):
        shapes.main()


def test_a_share_is_the_cores_time_of_the_median_pass() -> None:
    kept = kernels.read_pass(trace(SERIAL, 20.0), LAYERS)
    assert kept["passes"] == 3
    cores, whole = kernels.share_of(json.loads(json.dumps(kept)))
    # the second pass: 4 of convolution, 2 of what lies between, 21 of recurrence
    assert cores == pytest.approx(LAYERS * 27)
    assert whole == pytest.approx(LAYERS * (27 + 5 * 8) + 1)


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(kernels.KernelError, match=r"4 linear layers.*\[1, 3\]"):
        kernels.read_pass(trace(SERIAL, 20.0), LAYERS + 1)
    with pytest.raises(kernels.KernelError, match="linear layers"):
        kernels.read_pass([], LAYERS)


def test_time_that_two_kernels_share_counts_once() -> None:
    assert kernels.busy_us([(0, 4), (1, 2), (3, 6), (9, 10)]) == 7


@pytest.mark.parametrize(
    "name",
    [
        "_causal_conv1d_update_kernel", "_fused_qkvzba_causal_conv1d_update_contiguous_kernel",
        "fused_qkv_split_gdn_prefill_kernel", SERIAL,
        "fused_recurrent_gated_delta_rule_packed_decode_kernel",
        "prepare_gdn_any40_d6", "factor_gdn_any40_d6", "solve_gdn_any40_d6",
    ],
)  # fmt: skip
def test_kernels_of_a_core_are_known_and_others_are_not(name: str) -> None:
    assert kernels.find_cores(["gemm", name, "gemm"]) == [(1, 1)]
    for other in ("_layer_norm_fwd_1pass_kernel", "nvjet_tst_64x8", "commit_gdn_any40_d6"):
        assert not kernels.find_cores([other])


def test_kernels_that_are_emitted_are_those_of_a_core() -> None:
    text = (Path(__file__).parents[2] / "generated" / "gdn_any64_d8.py").read_text("utf-8")
    emitted = re.findall(r"def (\w+_gdn_any64_d8)\(", text)
    core = {name.partition("_")[0] for name in emitted if kernels.find_cores([name])}
    assert core == {"trace", "prepare", "factor", "solve"}
    assert "commit_gdn_any64_d8" in emitted


class Event:
    """An event of a device that does a pass a millisecond."""

    clock = 0.0

    def __init__(self) -> None:
        self.at = Event.clock

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_the_probe_tells_rounds_and_forgets_what_it_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_mark", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Event, "clock", 0.0)
    probe.seen.clear()

    def work(runner: Any, batch: Any) -> None:
        Event.clock += 2.0

    def forward(verify: bool, draft: bool) -> None:
        mode = types.SimpleNamespace(is_target_verify=lambda: verify, is_decode=lambda: not verify)
        batch = types.SimpleNamespace(forward_mode=mode, batch_size=4)
        probe.time_pass(work, types.SimpleNamespace(is_draft_worker=draft), batch)

    for _ in range(12):
        forward(True, False)
        forward(False, True)  # the draft model's own decode
        Event.clock += 1.0
    held = types.SimpleNamespace(internal_state={})
    said = probe.report(held).internal_state["probe"]
    assert said["verify"]["4"]["device"] == [2e3] * 3
    assert said["round"]["4"]["device"] == [5e3] * 3
    assert "decode" not in said
    forward(False, False)
    assert probe.report(held).internal_state["probe"] == {}

"""The memory plan is what allocate takes, to the byte, and gives the paper's Table I."""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bolegen.cli import main
from bolegen.codegen import compile_plan, list_buffers, plan_template
from bolegen.errors import SpecError
from bolegen.ir import MIXERS, DType, LayerSpec, TreePlan
from bolegen.memory import MemoryPlan, plan_memory
from bolegen.models import find_model
from bolegen_runtime import RoundBuffers
from support.rounds import import_module

PAGE = Path(__file__).resolve().parents[2] / "docs/memory.md"
MIB = 1 << 20
SMALL = LayerSpec(key_heads=1, value_heads=2, d_k=16, d_v=16)
LONG = "parents:[-1," + ",".join(str(i // 3) for i in range(299)) + "]"
PLANS: dict[str, dict[str, Any]] = {
    "9b": {"template": "(3,3,3)", "depth": 8},
    "9b-pku": {"template": "(3,3,3)", "spec": LayerSpec(factors="pku")},
    "9b-runtime": {"template": "any:64", "depth": 8},
    "122b-bf16-pool": {
        "template": "(4,2,2)",
        "spec": LayerSpec(value_heads=64, state_dtype=DType.BF16),
    },
    "odd": {
        "template": "parents:[-1,0,0,1,1,2,3,3,6,6,8]",
        "spec": LayerSpec(key_heads=30, value_heads=30, d_k=96, d_v=192, factors="pku"),
    },
    "root": {"template": "chain:0", "spec": SMALL},
    "star": {"template": "(500)", "spec": SMALL},
    "chain": {"template": "chain:100", "spec": replace(SMALL, dtype=DType.FP16, conv=2)},
    "fp32": {"template": "(2,2)", "spec": replace(SMALL, dtype=DType.FP32, conv=3)},
    "tf32": {"template": "(2,2)", "spec": replace(SMALL, contract="tf32", d_v=104)},
    "readout": {"template": "(2,2)", "spec": replace(SMALL, readout="bf16")},
    "rolled": {"template": LONG, "spec": replace(SMALL, d_k=64)},
    "wide-runtime": {"template": "any:512", "depth": 20, "spec": replace(SMALL, factors="pku")},
}
for _mixer in MIXERS.values():
    _spec = replace(SMALL, mixer=_mixer, value_heads=8, d_k=24, d_v=40)
    PLANS[f"{_mixer.name}-replay"] = {"template": "(3,3)", "spec": _spec}
    _pku = replace(_spec, factors="pku", dtype=DType.FP32)
    PLANS[f"{_mixer.name}-pku"] = {"template": "any:70", "depth": 12, "spec": _pku}


@cache
def plan_of(name: str) -> TreePlan:
    return plan_template(**PLANS[name])


def size_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(("batch", "layers"), [(1, 1), (2, 3), (5, 24)])
@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_what_allocate_takes(name: str, batch: int, layers: int) -> None:
    m = import_module(compile_plan(plan_of(name)))
    # shapes and dtypes without the memory: 9B's do not fit a test
    factors = m.allocate(batch, layers, "meta")
    held = {k: v for k, v in vars(factors).items() if isinstance(v, torch.Tensor)}
    taken = {b.name: b.bytes(batch, layers) for b in list_buffers(plan_of(name)) if b.exists}
    assert taken == {name: size_of([tensor]) for name, tensor in held.items()}
    memory = plan_memory(plan_of(name), layers=layers, batch=batch)
    assert memory.factors.total == factors.round_bytes
    assert memory.scratch.total == factors.scratch_bytes
    assert memory.factors.total + memory.scratch.total == size_of(held.values())
    for share in (memory.factors, memory.scratch, memory.snapshots, memory.states):
        assert share.total == batch * share.request + share.fixed
        assert share.fixed >= 0


@pytest.mark.parametrize("name", ["root", "fp32", "chain", "tf32", "mamba2-pku", "lightning-pku"])
def test_allocate_on_a_device_takes_no_more(name: str) -> None:
    factors = import_module(compile_plan(plan_of(name))).allocate(3, 2, "cpu")
    held = [t for t in vars(factors).values() if isinstance(t, torch.Tensor)]
    memory = plan_memory(plan_of(name), layers=2, batch=3)
    total = sum(t.untyped_storage().nbytes() for t in held)
    assert total == memory.factors.total + memory.scratch.total


@pytest.mark.parametrize("name", ["9b", "9b-runtime", "odd", "fp32"])
def test_the_plan_is_what_a_graph_pool_takes(name: str) -> None:
    m = import_module(compile_plan(plan_of(name)))
    buffers = RoundBuffers.allocate(m, 4, 3, torch.device("meta"))
    memory = plan_memory(plan_of(name), layers=3, batch=4)
    assert memory.graphs.total == size_of(vars(buffers).values())


@pytest.mark.parametrize("name", ["9b", "122b-bf16-pool", "odd"])
def test_snapshots_are_the_pools_times_the_nodes(name: str) -> None:
    plan, spec = plan_of(name), plan_of(name).spec
    memory = plan_memory(plan, layers=2, batch=3)
    kind = torch.bfloat16 if spec.state_dtype is DType.BF16 else torch.float32
    state = torch.empty(2, 3, spec.value_heads, spec.d_v, spec.d_k, dtype=kind, device="meta")
    window = torch.empty(2, 3, spec.channels, 3, dtype=torch.bfloat16, device="meta")
    assert memory.states.total == size_of([state, window])
    assert memory.snapshots.total == plan.tree.nodes * memory.states.total
    assert memory.states.total == 6 * spec.snapshot_bytes


def held(memory: MemoryPlan, batch: int, snapshots: bool) -> int:
    other = plan_memory(memory.plan, layers=memory.layers, batch=batch)
    parts = [other.snapshots] if snapshots else [other.factors, other.scratch]
    return other.states.total + sum(part.total for part in parts)


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("gigabytes", [3, 17, 141])
def test_one_request_more_than_fit_does_not(gigabytes: int, snapshots: bool) -> None:
    memory = plan_memory(plan_of("9b"), layers=24, batch=1)
    given = gigabytes * 10**9
    fit = memory.count_requests(given, snapshots=snapshots)
    assert fit > 0
    assert held(memory, fit, snapshots) <= given < held(memory, fit + 1, snapshots)


def test_too_little_memory_holds_nothing() -> None:
    memory = plan_memory(plan_of("9b"), layers=24, batch=1)
    assert memory.count_requests(10**6) == 0
    assert memory.count_requests(held(memory, 1, False)) == 1
    assert memory.count_requests(held(memory, 1, False) - 1) == 0


# arXiv 2608.01651, Table I: MB are 2^20 bytes, GB 2^30; windows and raw rows are not counted
TABLE_I = {
    "qwen3.5-4b": (48, "4.7", "9.4", 57),
    "qwen3.5-9b": (48, "4.7", "9.4", 57),
    "qwen3.5-27b": (144, "14.1", "28.1", 151),
    "qwen3.5-122b-a10b": (144, "14.1", "28.1", 142),
}


@pytest.mark.parametrize("name", TABLE_I)
def test_the_papers_table_follows_from_the_shapes(name: str) -> None:
    model = find_model(name)
    spec = LayerSpec(key_heads=model.key_heads, value_heads=model.value_heads, factors="pku")
    state = model.layers * spec.value_heads * spec.d_k * spec.d_v * 4
    factors = model.layers * (spec.factor_bytes - spec.row_bytes)
    said = (
        state // MIB,
        f"{100 * state / 1024 / MIB:.1f}",
        f"{200 * state / 1024 / MIB:.1f}",
        math.ceil(100 * factors / MIB - 0.5),
    )
    assert said == TABLE_I[name]
    # the ratio that the paper prints divides its rounded figures, 1,000 MB to the GB
    assert 82 <= 1000 * float(said[1]) / said[3] <= 99.4
    replayed = replace(spec, factors="replay").factor_bytes
    row = f"| {name} | {said[0]} | {said[1]} | {said[2]} | {said[3]} | {state / factors:.0f} |"
    row += f" {spec.snapshot_bytes / replayed:.0f} |"
    assert row in PAGE.read_text("utf-8")


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text("utf-8")
    command = re.search(r"^\$ bolegen (plan .*)$", page, re.MULTILINE)
    assert command is not None
    assert main(command.group(1).replace('"', "").split()) == 0
    assert capsys.readouterr().out in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "0"], "batch 0 must be 1 to 1,000,000"),
        (["--layers", "-1"], "layers -1 must be"),
        (["--gpu-mem", "0"], "GPU memory 0.0 must be more than 0 GB"),
        (["--gpu-mem", "nan"], "GPU memory nan"),
        (["--gpu-mem", "inf"], "GPU memory inf"),
        (["--model", "gpt-2"], "model 'gpt-2' not known"),
        (["--depth", "1"], "smaller than the template's 2"),
    ],
)
def test_a_mistake_is_named_in_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--template", "(2,2)", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_options_override_the_models_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--template", "(2)", "--layers", "6", "--batch", "1"]) == 0
    assert capsys.readouterr().out.startswith("1 request of 3 nodes in 6 layers")
    assert main(["plan", "--template", "any:8", "--model", "qwen3.5-27b", "--batch", "2"]) == 0
    assert capsys.readouterr().out.startswith("2 requests of at most 8 nodes in 48 layers")


def test_numbers_are_refused_by_the_function_too() -> None:
    with pytest.raises(SpecError, match="batch 0"):
        plan_memory(plan_of("root"), layers=1, batch=0)

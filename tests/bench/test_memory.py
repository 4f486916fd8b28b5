"""The memory benchmark counts SGLang's shapes, and its page is made of its lines alone."""

from typing import Any

import pytest
import torch

from benchmarks.memory import LOGGED_GIB, WANTED, fill_page, play, sglang_shapes, tables
from bolegen.codegen import compile_plan, plan_template
from bolegen.ir import LayerSpec
from bolegen.memory import plan_memory
from support.rounds import import_module

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
LINE: dict[str, Any] = {
    "layers": 6, "batch": 8, "nodes": 40, "layout": "replay", "factors": 1000, "scratch": 200,
    "handed_out": 1536, "sglang": 135_000, "times": 135.0, "snapshots": 120_000,
    "device": "a GPU", "torch": "2", "triton": "3", "times_logged": 134.2,
}  # fmt: skip


def test_the_shapes_are_those_of_sglangs_log_and_the_goal_is_met() -> None:
    memory = plan_memory(plan_template("(3,3,3)"), layers=6, batch=8)
    states, windows = sglang_shapes(memory, device="meta")
    gib = [t.numel() * t.element_size() / (1 << 30) for t in (states, windows)]
    assert [f"{size:.2f}" for size in gib] == ["4.22", "0.10"]
    assert sum(gib) == pytest.approx(LOGGED_GIB, abs=0.005)
    assert sum(gib) * (1 << 30) / memory.factors.total >= WANTED
    assert states.dtype is torch.float32


def test_the_round_that_is_measured_is_judged() -> None:
    plan = plan_template("(2,1)", LayerSpec(key_heads=1, value_heads=2, d_k=16, d_v=16))
    memory = plan_memory(plan, layers=2, batch=2)
    assert 0 < play(import_module(compile_plan(plan)), memory, "cpu")["worst"] <= 1


def test_the_page_holds_the_last_line_of_each_case() -> None:
    old = {**LINE, "factors": 77}
    page = fill_page(f"before\n{BEGIN}\nstale\n{END}\nafter\n", [old, LINE])
    assert page.startswith(f"before\n{BEGIN}\n\nMeasured on a GPU, torch 2, Triton 3.")
    assert page.endswith(f"\n{END}\nafter\n")
    assert "| 6 | replay | 1,000 | 200 | 1,536 | 135,000 | 135.0 | 120.0 |" in page
    assert "4.32 GiB for six layers: 134.2 times smaller" in page
    assert "stale" not in page
    assert "77" not in page


def test_a_page_without_lines_or_markers() -> None:
    assert tables([]) == "Not yet measured.\n"
    with pytest.raises(ValueError, match="expected the lines"):
        fill_page("no markers", [LINE])

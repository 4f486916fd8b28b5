"""How a batch is cut into programs changes no bit; many column blocks run in loops."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen.codegen import compile_plan, compile_template, plan_template
from bolegen.ir import LayerSpec
from support.rounds import import_module, make_round, play, poison, same_bits

BATCHES = (1, 2, 3, 4)
TREES = {"(3,3,3)": {}, "any:20": {"depth": 7}, "chain:17": {}}


def tiled(template: str, layout: str, depth: int | None = None, **tiling: Any) -> ModuleType:
    """A small module with some of its tiling replaced."""
    spec = LayerSpec(key_heads=1, value_heads=2, d_k=16, d_v=32, factors=layout)
    plan = plan_template(template, spec, depth=depth)
    plan = replace(plan, tiling=replace(plan.tiling, **tiling))
    if plan.tiling.rolled:
        plan = replace(plan, precision=replace(plan.precision, readout_terms=0, fold=None))
    return import_module(compile_plan(plan))


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("template", list(TREES))
def test_every_cut_gives_the_same_bits(template: str, layout: str) -> None:
    # merged at 1, then one tile a program, half of them, all of them and heads together
    cuts = {"merge_batch": 1, "half_batch": 3, "full_batch": 4, "share_batch": 4}
    m = tiled(template, layout, **TREES[template], **cuts, b_v=16)
    tree = [-1, *(max(0, n - 3) for n in range(1, m.MODULE.nodes))]
    trees = None if m.MODULE.parents else [tree] * 4
    whole = make_round(m, batch=4, slots=6, trees=trees)
    outs, factors = {}, {}
    for batch in BATCHES:
        r = replace(
            whole,
            x=whole.x[:, :batch],
            a=whole.a[:, :batch],
            b=whole.b[:, :batch],
            slots=whole.slots[:batch],
            parents=None if whole.parents is None else whole.parents[:batch],
            trees=whole.trees[:batch],
        )
        factors[batch] = poison(m.allocate(batch, 1, "cpu"))
        factors[batch].convolved = False
        outs[batch] = r.verify(m, factors[batch], 0)
    for batch in BATCHES[:-1]:
        assert same_bits(outs[batch], outs[4][:batch])
        kept = ["rows", "gates"] + (["keys", "u"] if layout == "pku" else [])
        for name in kept:
            one, other = getattr(factors[batch], name), getattr(factors[4], name)
            assert same_bits(one, other[:, :batch]), name


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("template", ["any:70", "chain:69"])
def test_column_blocks_in_loops_keep_the_contract(template: str, layout: str) -> None:
    depth = 9 if template.startswith("any") else None
    m = tiled(template, layout, depth, rolled=True, merge_batch=0, b_r=32)
    nodes = m.MODULE.nodes
    trees = None if m.MODULE.parents else [[-1, *((n - 1) // 2 for n in range(1, nodes))]]
    r = make_round(m, batch=1, trees=trees, repeat=0.8, log_rate=(-6.0, 2.0))
    r.live = torch.arange(nodes)[None] < nodes - 5
    play(m, r, [nodes - 6]).assert_within()


def test_only_large_trees_run_in_loops() -> None:
    assert compile_template("any:256", depth=16).plan.tiling.rolled
    assert not compile_template("any:128", depth=16).plan.tiling.rolled


@pytest.mark.parametrize("b_r", [16, 32])
def test_few_rows_of_y_at_a_time_fill_what_solve_reads(b_r: int) -> None:
    # float32 activations at d_k 128 leave room for 32 rows, while solve takes 64 nodes at once
    m = tiled("any:64", "pku", 12, b_r=b_r)
    tree = [-1, *((n - 1) // 2 for n in range(1, 64))]
    play(m, make_round(m, batch=1, trees=[tree]), [63]).assert_within()

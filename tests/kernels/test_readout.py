"""A bf16 readout changes outputs alone, within a bound of its own; the default is strict."""

from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bolegen.codegen import compile_plan, compile_template, plan_template
from bolegen.codegen.emit import digest_of
from bolegen.errors import CheckError, SpecError
from bolegen.ir import DType, LayerSpec, check_plan
from support.rounds import (
    Round,
    check_commit,
    check_verify,
    import_module,
    make_round,
    play,
    poison,
    same_bits,
)
from support.rounds import build as build_any

LAYOUTS = ["replay", "pku"]
# template, then how the round is drawn; a state so large that O is what cancellation leaves
ROUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "random": ("(3,2)", {}),
    "random at run time": ("any:12", {}),
    "large states": ("(3,2)", {"state": 1e3, "repeat": 1.0}),
    "parallel keys": ("chain:8", {"repeat": 1.0, "write": 12.0, "log_rate": (-12.0, -9.0)}),
    "nearly parallel keys": ("chain:17", {"repeat": 0.9, "write": 2.0, "log_rate": (-9.0, -5.0)}),
    "decays that underflow": ("chain:8", {"log_rate": (3.0, 5.0), "step": 4.0}),
}
every_round = pytest.mark.parametrize(("template", "drawn"), ROUNDS.values(), ids=ROUNDS)
build = partial(build_any, value_heads=1, d_k=32, d_v=32)


def round_of(m: ModuleType, *, state: float = 1.0, **drawn: Any) -> Round:
    nodes = m.MODULE.nodes
    trees = None
    if m.MODULE.parents is None:
        trees = [[-1, *(max(0, n - 2) for n in range(1, nodes))]] * 2
    r = make_round(m, trees=trees, **drawn)
    r.state.mul_(state)
    return r


def strict(m: ModuleType) -> Any:
    """The module's record as the default's, for a judge that must not know the option."""
    return SimpleNamespace(MODULE=replace(m.MODULE, readout="split"))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_round
def test_outputs_keep_the_looser_bound_and_all_else_the_bits_of_the_default(
    template: str, drawn: dict[str, Any], layout: str
) -> None:
    depth = 6 if template.startswith("any") else None
    kept, outs = [], []
    for readout in ("split", "bf16"):
        m = build(template, depth=depth, factors=layout, readout=readout)
        r, last = round_of(m, **drawn), [m.MODULE.nodes - 1, 1]
        factors, was = poison(m.allocate(2, 1, "cpu")), r.with_clones()
        outs.append(r.verify(m, factors))
        assert same_bits(r.state, was.state)
        assert same_bits(r.conv_state, was.conv_state)
        worst = check_verify(m, r, outs[-1], factors)
        r.commit(m, factors, last)
        pools = (was.state, was.conv_state), (r.state, r.conv_state)
        (worst | check_commit(m, r, factors, *pools, last)).assert_within()
        kept.append([r.state, r.conv_state, *([factors.u] if layout == "pku" else [])])
    assert not same_bits(*outs)
    assert all(same_bits(one, other) for one, other in zip(*kept, strict=True))


def test_its_outputs_are_outside_of_the_strict_bound() -> None:
    # else there would be nothing to opt into; the strict judge can tell the two apart
    found = {}
    for readout in ("split", "bf16"):
        m = build("chain:12", readout=readout)
        r = make_round(m, write=4.0)
        factors = m.allocate(2, 1, "cpu")
        out = r.verify(m, factors)
        found[readout] = check_verify(strict(m), r, out, factors).ratios["o"]
    assert found["split"] <= 1 < found["bf16"]


@pytest.mark.parametrize("size", ["1.02", "0.98"])
def test_a_coarser_readout_fails_the_looser_bound(size: str) -> None:
    spec = LayerSpec(key_heads=1, value_heads=1, d_k=32, d_v=32, readout="bf16")
    was = compile_template("chain:12", spec)
    text = was.text.replace("b_r.to(tl.bfloat16)", f"({size} * b_r).to(tl.bfloat16)")
    assert text != was.text
    m = import_module(replace(was, text=text, digest=digest_of(text)))
    r = make_round(m, write=4.0)
    assert play(m, r, [12, 3]).ratios["o"] > 1


def test_dead_nodes_of_a_bf16_readout_may_hold_anything() -> None:
    m = build("any:12", depth=11, readout="bf16")
    r = make_round(m, batch=1, trees=[[-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7]])
    r.live = torch.tensor([[i not in (2, 5, 6, 9, 10, 11) for i in range(12)]])
    for given in (r.x, r.a, r.b):
        given[:, ~r.live] = float("nan")
    play(m, r, [8]).assert_within()


def test_the_tf32_contract_keeps_a_hundredfold_bound_on_drawn_keys() -> None:
    m = build("(3,3)", contract="tf32", factors="pku")
    alike: list[dict[str, Any]] = [{}, {"repeat": 0.5}, {"repeat": 0.9, "write": 2.0}]
    found = [play(m, make_round(m, batch=1, **drawn), [12]).ratios for drawn in alike]
    assert max(ratios["u"] for ratios in found) > 3
    for ratios in found:
        assert max(ratios["u"], ratios["state"]) <= 100
        assert ratios["o"] <= 1


@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP32])
def test_only_bf16_outputs_have_it(dtype: DType) -> None:
    with pytest.raises(SpecError, match=rf"not to {dtype.value}; use readout split"):
        LayerSpec(dtype=dtype, readout="bf16")
    with pytest.raises(SpecError, match="readout 'fp8' not known; have split, bf16"):
        LayerSpec(readout="fp8")


def test_trees_whose_columns_run_in_loops_refuse_it() -> None:
    with pytest.raises(SpecError, match=r"trees of 256 nodes: .* use readout split"):
        plan_template("any:256", LayerSpec(readout="bf16"), depth=16)


def test_no_plan_rounds_y_where_the_layer_does_not_ask_for_it() -> None:
    plan = plan_template("(3,3,3)")
    wrong = replace(plan, precision=replace(plan.precision, readout_terms=1))
    with pytest.raises(CheckError, match="one bf16 term only where the layer asks for it"):
        check_plan(wrong)


def test_it_shows_in_name_record_and_header() -> None:
    emitted = compile_plan(plan_template("(3,3,3)", LayerSpec(readout="bf16"), depth=8))
    assert emitted.name == "gdn_3x3x3_d8_rbf16"
    assert "contract fp32, readout bf16; " in emitted.text.partition("\n\nFor one")[0]
    assert "Y in bf16x3, then bf16, as R" in emitted.text
    module = import_module(emitted)
    assert (module.MODULE.contract, module.MODULE.readout) == ("fp32", "bf16")
    assert import_module(compile_template("(3,3,3)", depth=8)).MODULE.readout == "split"

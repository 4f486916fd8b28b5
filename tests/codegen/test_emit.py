"""Emitted text: deterministic, formatted, self-contained, and as long as the plan says."""

import ast
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import tree_parents
from bolegen.codegen import EmittedModule, compile_plan, compile_template, plan_template
from bolegen.codegen.cut import cut_tiles
from bolegen.codegen.emit import digest_of, write_module
from bolegen.errors import SpecError
from bolegen.ir import (
    GDN,
    GDN_NEG,
    KDA,
    LIGHTNING,
    MAMBA2,
    MIXERS,
    TARGETS,
    Decay,
    DType,
    LayerSpec,
    Solver,
    TreePlan,
    find_target,
)

ROOT = Path(__file__).resolve().parents[2]
SMALL = LayerSpec(key_heads=1, value_heads=3, d_k=16, d_v=48)
LONG = "parents:[-1," + ",".join(str(i // 3) for i in range(299)) + "]"
SPREAD: dict[str, dict[str, Any]] = {
    "root": {"template": "chain:0"},
    "9b": {"template": "(3,3,3)", "depth": 8},
    "9b-pku": {"template": "(3,3,3)", "spec": LayerSpec(factors="pku")},
    "chain": {"template": "chain:8"},
    "star": {"template": "(500)", "spec": SMALL},
    "runtime": {"template": "any:64", "depth": 8, "spec": LayerSpec(factors="pku")},
    "wide-runtime": {"template": "any:512", "depth": 20, "spec": SMALL},
    "random": {"template": LONG, "spec": replace(SMALL, dtype=DType.FP32, conv=2)},
    "deep": {"template": "chain:100", "spec": replace(SMALL, dtype=DType.FP16)},
    "levels": {"template": "(2,2,2)", "solver": Solver.LEVELS},
    "odd": {
        "template": "(5,2)",
        "spec": LayerSpec(key_heads=3, value_heads=1023, d_k=96, d_v=200),
    },
    "bf16-state": {
        "template": "(2,2)",
        "spec": LayerSpec(state_dtype=DType.BF16, d_k=256, d_v=512, contract="tf32"),
    },
    "readout": {"template": "(3,3)", "spec": LayerSpec(readout="bf16", factors="pku")},
    "target": {"template": "(3,3)", "target": find_target("gfx942"), "depth": 511},
}
OTHERS = [mixer for mixer in MIXERS.values() if mixer is not GDN]
for _mixer in OTHERS:
    _spec, _pku = replace(SMALL, mixer=_mixer, conv=2), LayerSpec(mixer=_mixer, factors="pku")
    SPREAD[f"{_mixer.name}-static"] = {"template": "(2,2)", "spec": _spec}
    SPREAD[f"{_mixer.name}-runtime"] = {"template": "any:64", "depth": 8, "spec": _pku}
# drafted trees: of 64 nodes in place, of 128 those with descendants moved to the front
EAGLE, EAGLE_128 = (
    "parents:" + str(list(tree_parents(f"eagle{nodes}"))).replace(" ", "") for nodes in (64, 128)
)
for _mixer in (GDN, KDA, MAMBA2):
    SPREAD[f"{_mixer.name}-drafted"] = {"template": EAGLE, "spec": LayerSpec(_mixer)}
SPREAD["gdn-drafted-128"] = {"template": EAGLE_128}
SPREAD["mamba2-long"] = {"template": LONG, "spec": replace(SMALL, mixer=MAMBA2, dtype=DType.FP32)}
SPREAD["lightning-root"] = {"template": "chain:0", "spec": LayerSpec(LIGHTNING, factors="pku")}


@cache
def emitted(name: str) -> EmittedModule:
    return compile_template(**SPREAD[name])


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def functions_of(module: EmittedModule) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in parsed(module.text).body if isinstance(n, ast.FunctionDef)}


def function(module: EmittedModule, kind: str) -> ast.FunctionDef:
    """A kernel by its kind, or what kernels call by its name."""
    functions = functions_of(module)
    return functions.get(kind) or functions[f"{kind}_{module.name}"]


def test_every_process_emits_the_same_text() -> None:
    some = [("(3,3,3)", 8), ("any:64", 8), (LONG, None)]
    code = (
        "from bolegen.codegen import compile_template\n"
        f"print(*(compile_template(text, depth=depth).digest for text, depth in {some}))"
    )
    runs = set()
    for seed in ("0", "1", "4242"):
        environment = dict(os.environ, PYTHONHASHSEED=seed)
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        runs.add(done.stdout)
    assert len(runs) == 1


@pytest.mark.parametrize("name", SPREAD)
def test_compiling_twice_gives_the_same(name: str) -> None:
    again = compile_template(**SPREAD[name])
    assert (again.text, again.digest) == (emitted(name).text, emitted(name).digest)
    assert digest_of(again.text) == again.digest
    assert again.text.count(again.digest) == 2


def test_emitted_modules_are_formatted_and_free_of_lint(tmp_path: Path) -> None:
    for name in SPREAD:
        write_module(emitted(name), tmp_path)
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["format", "--check", "--diff"], ["check"]):
        done = subprocess.run([*ruff, *command, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_headers_have_one_height() -> None:
    heights = {}
    for name in SPREAD:
        docstring = parsed(emitted(name).text).body[0]
        heights[name] = docstring.end_lineno
    assert len(set(heights.values())) == 1, heights


@pytest.mark.parametrize("name", SPREAD)
def test_a_module_needs_torch_triton_and_the_standard_library(name: str) -> None:
    nodes = list(ast.walk(parsed(emitted(name).text)))
    found = {
        alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {str(node.module).partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {"torch", "triton"} <= found
    assert found - {"torch", "triton"} <= sys.stdlib_module_names


CHANGED: dict[str, Any] = {
    "key_heads": 8,
    "value_heads": 64,
    "d_k": 64,
    "d_v": 256,
    "conv": 3,
    "dtype": DType.FP16,
    "state_dtype": DType.BF16,
    "factors": "pku",
    "contract": "tf32",
    "readout": "bf16",
}


def bare(module: EmittedModule) -> str:
    """The text without its name, its mixer's name and its digest."""
    text = module.text.replace(module.name, "NAME").replace(module.digest, "")
    return text.replace(f'"{module.plan.spec.mixer.name}"', "MIXER")


def test_every_field_of_the_layer_shows_in_name_and_text() -> None:
    assert {field.name for field in fields(LayerSpec)} == {*CHANGED, "mixer"}
    specs = [LayerSpec(), *map(LayerSpec, OTHERS)]
    modules = [compile_template("(3,3,3)", spec, depth=8) for spec in specs]
    for name, value in CHANGED.items():
        changed = replace(LayerSpec(), **{name: value})
        modules.append(compile_template("(3,3,3)", changed, depth=8))
    assert len({m.name for m in modules}) == len(modules)
    assert len({bare(m) for m in modules}) == len(modules)


def test_template_depth_solver_and_target_show_in_the_name() -> None:
    options: list[dict[str, Any]] = [
        {"template": "(3,3,3)", "depth": 8},
        {"template": "(3,3,3)", "depth": 9},
        {"template": "(3,3,2)", "depth": 8},
        {"template": "chain:8", "depth": 8},
        {"template": "any:40", "depth": 8},
        {"template": "any:40", "depth": 9},
        {"template": "any:41", "depth": 8},
        {"template": "parents:[-1,0,0,1]", "depth": 8},
        {"template": "parents:[-1,0,0,2]", "depth": 8},
        {"template": "(3,3,3)", "depth": 8, "target": find_target("sm_90")},
        *({"template": "(3,3,3)", "depth": 8, "solver": solver} for solver in Solver),
    ]
    modules = [compile_template(**given) for given in options]
    assert len({m.name for m in modules}) == len(modules)
    assert len({m.digest for m in modules}) == len(modules)
    assert all(m.name.isidentifier() for m in modules)


def numbers_of(value: Any) -> dict[str, Any]:
    """Another legal value for every field of a precision or a tiling."""
    other: dict[str, Any] = {}
    for field in fields(value):
        now = getattr(value, field.name)
        if isinstance(now, bool):
            other[field.name] = not now
        elif now is None:
            other[field.name] = 96
        elif isinstance(now, int):
            terms = {"state_terms": 1, "readout_terms": 0}
            other[field.name] = terms.get(field.name, 2 * now)
        else:
            other[field.name] = "ieee"
    return other


@pytest.mark.parametrize("part", ["precision", "tiling"])
def test_every_decision_of_the_plan_shows_in_the_digest(part: str) -> None:
    # what only some mixers read shows in theirs
    plans = [plan_template("(3,3,3)", LayerSpec(mixer), depth=8) for mixer in (GDN, KDA)]
    others = [numbers_of(getattr(plan, part)) for plan in plans]
    digests = {tuple(compile_plan(plan).digest for plan in plans)}
    for name in others[0]:
        digest = tuple(
            compile_plan(replace(plan, **_changed(plan, part, name, other[name]))).digest
            for plan, other in zip(plans, others, strict=True)
        )
        assert digest not in digests, f"{part}.{name} changes nothing"
        digests.add(digest)


def _changed(plan: TreePlan, part: str, name: str, value: Any) -> dict[str, Any]:
    return {part: replace(getattr(plan, part), **{name: value})}


@pytest.mark.parametrize("name", SPREAD)
def test_the_polynomial_is_nested_and_never_summed(name: str) -> None:
    """X <- R - G X keeps R as what is added; adding to X, or squaring G, loses all digits."""
    kinds = ["_factor", "solve"] + ["_invert"] * ("def _invert" in emitted(name).text)
    if not emitted(name).plan.spec.mixer.delta:
        assert "b_g = -(" not in emitted(name).text, "there is no G"
    for kind in kinds:
        whole = function(emitted(name), kind)
        for call in calls(whole, "tl.dot"):
            left, right = (ast.unparse(arg) for arg in call.args)
            assert left != right, "a matrix times itself"
        for node in ast.walk(whole):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            target = ast.unparse(node.targets[0])
            operands = [ast.unparse(arg) for arg in node.value.args]
            added = [ast.unparse(k.value) for k in node.value.keywords if k.arg == "acc"]
            if ast.unparse(node.value.func) == "tl.dot" and target in operands:
                assert target not in added, f"{target} is summed up"
    assert "b_g @" not in emitted(name).text


@pytest.mark.parametrize("name", SPREAD)
def test_kernels_take_the_arguments_that_they_are_described_with(name: str) -> None:
    module = emitted(name)
    functions = functions_of(module)
    for kernel in module.module.kernels:
        taken = [argument.arg for argument in functions[kernel.name].args.args]
        assert taken == [param.name for param in kernel.params], kernel.name


def planned_dots(plan: TreePlan) -> tuple[int, int]:
    """tl.dot calls of factor and solve as written: Y (and Z) by column blocks, R against them."""
    delta = plan.spec.mixer.delta
    both = 2 if plan.spec.factors == "pku" and delta else 1
    terms = 3 if plan.precision.readout_terms == 2 else 1
    factor, solve = 0, 0
    # one column block: written out for a head alone, and for all value heads of a key head
    heads = {1, plan.tiling.heads} if len(plan.columns) == 1 else {1}
    for start in range(0, plan.rows, plan.tiling.b_r) if delta else ():
        blocks = [block for block in plan.columns if block.start < start + plan.tiling.b_r]
        for block in blocks:
            later = [other for other in blocks if other.start > block.start]
            factor += both * sum(meets(plan, other.nodes, block.nodes) for other in later)
            factor += both * sum(heads) * (1 if block.inverted or block.steps else 0)
    tiles = cut_tiles(plan)["tiles"]
    for tile in tiles:
        # operands that are decayed by channel enter in two terms as well
        by_channel = plan.spec.mixer.decay is Decay.CHANNEL and plan.precision.state_terms > 0
        solve += max(1, plan.precision.state_terms) + by_channel
        solve += len(tile["columns"]) * (terms + both - 1)
    return factor, solve


def meets(plan: TreePlan, nodes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether a node of the first has an ancestor among the others."""
    if plan.tree.parents is None:
        return True
    above = {a for n in nodes if n >= 0 for a in plan.tree.path(n)[:-1]}
    return not above.isdisjoint(others)


@pytest.mark.parametrize("name", [name for name in SPREAD if name != "wide-runtime"])
def test_products_are_as_many_as_planned(name: str) -> None:
    module = emitted(name)
    found = tuple(len(calls(function(module, kind), "tl.dot")) for kind in ("_factor", "solve"))
    assert found == planned_dots(module.plan)


@pytest.mark.parametrize("template", ["chain:17", "any:64"])
def test_u_is_not_stored_where_write_gates_of_two_would_spoil_it(template: str) -> None:
    spec = LayerSpec(GDN_NEG, factors="pku")
    with pytest.raises(SpecError, match=r"factors pku at depth 17: .* use --factors replay"):
        plan_template(template, spec, depth=17)
    assert plan_template("chain:16", spec).steps == 16
    assert plan_template(template, LayerSpec(GDN_NEG), depth=17).depth == 17


@pytest.mark.parametrize("mixer", ["gdn", "gdn_neg", "deltanet", "mamba2", "lightning"])
def test_a_static_tree_has_no_more_node_tiles_than_a_topology_at_run_time(mixer: str) -> None:
    spec = LayerSpec(MIXERS[mixer])
    static, runtime = plan_template(EAGLE, spec), plan_template("any:64", spec, depth=8)
    assert len(static.tree.internal) == 35
    assert static.places == tuple(range(64))
    tiles, others = cut_tiles(static)["tiles"], cut_tiles(runtime)["tiles"]
    assert [(t["start"], t["rows"]) for t in tiles] == [(t["start"], t["rows"]) for t in others]
    # what its leaves do not fill stays apart
    assert plan_template("(3,3,3)", spec).column_count == 16
    assert plan_template(EAGLE_128, spec).column_count == 64


def test_many_column_blocks_run_in_loops() -> None:
    module = compile_template("any:256", depth=16)
    assert module.plan.tiling.rolled
    assert len(calls(function(module, "_factor"), "tl.dot")) == 2


def test_a_tree_of_three_levels_needs_two_products_with_g() -> None:
    # 13 nodes with descendants lie two levels deep; the leaves are read off once
    plan = plan_template("(3,3,3)", depth=8)
    assert plan.steps == 3
    assert [(block.rows, block.column, block.steps) for block in plan.blocks] == [
        (16, True, 2),
        (32, False, 0),
    ]


@pytest.mark.parametrize("solver", [None, *Solver])
@pytest.mark.parametrize(
    ("d_k", "dtype"), [(128, DType.BF16), (128, DType.FP32), (256, DType.FP32)]
)
@pytest.mark.parametrize("target", [None, "sm_90"])
def test_no_block_of_columns_lies_across_two_tiles_of_rows(
    solver: Solver | None, d_k: int, dtype: DType, target: str | None
) -> None:
    spec = LayerSpec(d_k=d_k, dtype=dtype)
    trees = [EAGLE, EAGLE_128, "(3,3,3)", "(4,4,4)", "(2,18,2)", "chain:100"]
    for template in [*trees, *([] if solver is Solver.LEVELS else ["any:64", "any:144"])]:
        try:
            plan = plan_template(
                template, spec, depth=100 if "chain" in template else 8, solver=solver,
                target=TARGETS[target] if target else None,
            )  # fmt: skip
        except SpecError:  # levels of a chain
            assert solver is Solver.LEVELS
            continue
        for block in plan.columns:
            first, last = block.start, block.start + block.rows - 1
            assert first // plan.tiling.b_r == last // plan.tiling.b_r, (template, block)

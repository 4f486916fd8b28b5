from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bolegen import oracle
from bolegen.codegen.passes import PASSES
from bolegen.errors import TreeError
from bolegen.interpret import Matrix, Operands, interpret
from bolegen.ir import (
    MIXERS,
    Block,
    LayerSpec,
    Mixer,
    Solver,
    TreePlan,
    TreeTemplate,
    parse_template,
    plan_tree,
)
from support.strategies import draw_gates, heads, layer_specs, one_head, trees

CLOSE = 1e-12  # of the norms that U and O are made of


def check(plan: TreePlan, head: tuple[oracle.Array, ...], parents: tuple[int, ...]) -> None:
    """The plan's U and O against the recurrence, in norms over the head."""
    want = oracle.recurrence(parents, *head, mixer=plan.spec.mixer)
    operands = one_head(head, parents)
    u, o = interpret(plan, operands, parents)
    scale = np.linalg.norm(operands.v) + np.linalg.norm(operands.ks)
    assert np.linalg.norm(u - want.u[:, 0]) <= CLOSE * scale
    assert np.linalg.norm(o - want.o[:, 0]) <= CLOSE * (scale + np.linalg.norm(operands.qs))


def stages(plan: TreePlan) -> list[tuple[str, TreePlan]]:
    """The plan before and after every pass."""
    plans = [("plan_tree", plan)]
    for run in PASSES:
        plan = run(plan)
        plans.append((run.__name__, plan))
    return plans


@settings(max_examples=60)
@given(st.data())
def test_every_pass_preserves_meaning(data: st.DataObject) -> None:
    tree = data.draw(trees(40))
    spec = data.draw(layer_specs())
    solver = data.draw(st.sampled_from([None, *Solver] if spec.mixer.delta else [None]))
    head = data.draw(heads(tree.nodes, spec.mixer))
    depth = tree.depth + data.draw(st.integers(0, 3))
    assert tree.parents is not None
    for _, plan in stages(plan_tree(tree, spec, depth=depth, solver=solver)):
        check(plan, head, tree.parents)


@settings(max_examples=30)
@given(st.data())
def test_every_pass_preserves_meaning_at_run_time(data: st.DataObject) -> None:
    tree = data.draw(trees(40))
    most = tree.nodes + data.draw(st.integers(0, 40))
    spec = data.draw(layer_specs())
    solvers = [None, Solver.HORNER, Solver.SUBSTITUTION] if spec.mixer.delta else [None]
    solver = data.draw(st.sampled_from(solvers))
    depth = data.draw(st.integers(tree.depth, most))
    head = data.draw(heads(tree.nodes, spec.mixer))
    assert tree.parents is not None
    plan = plan_tree(TreeTemplate.runtime(most), spec, depth=depth, solver=solver)
    for _, after in stages(plan):
        check(after, head, tree.parents)


SOLVED = [
    (mixer, solver) for mixer in MIXERS.values() for solver in (Solver if mixer.delta else [None])
]


@pytest.mark.parametrize(("mixer", "solver"), SOLVED, ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("text", ["(3,3,3)", "chain:20", "(63)", "(1,1,1,1,20)", "chain:0"])
def test_every_solver_on_shapes_that_fill_tiles_badly(
    text: str, mixer: Mixer, solver: Solver | None
) -> None:
    tree = parse_template(text)
    numbers = np.random.default_rng(tree.nodes)
    q, k = numbers.normal(size=(2, tree.nodes, 1, 8))
    q, k = oracle.normalise(q, k, mixer)
    gates = draw_gates(mixer, numbers, (tree.nodes, 1))
    head = (q, k, numbers.normal(size=(tree.nodes, 1, 4)), *gates, numbers.normal(size=(1, 4, 8)))
    assert tree.parents is not None
    for _, plan in stages(plan_tree(tree, LayerSpec(mixer=mixer), solver=solver)):
        check(plan, head, tree.parents)


def test_parallel_keys_do_not_grow_an_error_with_depth() -> None:
    # docs/theory.md, fact 1: drafts that repeat a token
    tree = parse_template("chain:32")
    numbers = np.random.default_rng(7)
    rows = numbers.normal(size=(1, 1, 16)) + 0.1 * numbers.normal(size=(33, 1, 16))
    q, k = oracle.normalise(rows, rows)
    v, state = numbers.normal(size=(33, 1, 4)), numbers.normal(size=(1, 4, 16))
    assert tree.parents is not None
    head = (q, k, v, np.zeros((33, 1)), np.ones((33, 1)), state)
    plan = stages(plan_tree(tree))[-1][1]
    want, (u, _) = oracle.recurrence(tree.parents, *head), interpret(plan, one_head(head))
    assert np.linalg.norm(u - want.u[:, 0]) <= 1e-12 * np.linalg.norm(v)


def exact(numbers: np.random.Generator, nodes: int) -> Operands:
    """Fractions, every operand of its own."""

    def draw(*shape: int) -> Matrix:
        drawn = numbers.integers(1, 10, shape) * numbers.choice([-1, 1], shape)
        made: Matrix = np.vectorize(lambda n: Fraction(int(n), 7), otypes=[object])(drawn)
        return made

    square, rows = (nodes, nodes), (nodes, 2)
    return Operands(
        draw(*square),
        draw(*square),
        draw(*rows),
        draw(*rows),
        draw(*rows),
        draw(nodes),
        draw(nodes),
    )


def test_fractions_and_residues_agree_exactly() -> None:
    prime, tree = 2**26 - 5, parse_template("(2,2,1)")
    plan = stages(plan_tree(tree))[-1][1]
    operands = exact(np.random.default_rng(3), tree.nodes)

    def residue(matrix: Matrix) -> Matrix:
        values = [int(f.numerator) * pow(f.denominator, -1, prime) % prime for f in matrix.flat]
        return np.array(values, dtype=np.int64).reshape(matrix.shape)

    names = ("kk", "qk", "ks", "qs", "v", "decay", "beta")
    modular = replace(
        operands, modulus=prime, **{name: residue(getattr(operands, name)) for name in names}
    )
    for fractions, residues in zip(
        interpret(plan, operands), interpret(plan, modular), strict=True
    ):
        assert np.array_equal(residue(fractions), residues)


def test_a_decay_of_zero_cuts_below_it_alone() -> None:
    head = one_head_of_chain([0.5, 0.0, 0.5])
    operands = one_head(head)
    u, _ = interpret(plan_tree(parse_template("chain:2")), operands)
    beyond = replace(operands, ks=operands.ks * np.array([[1.0], [9.0], [9.0]]))
    again, _ = interpret(plan_tree(parse_template("chain:2")), beyond)
    assert np.array_equal(u, again)


def one_head_of_chain(decays: list[float]) -> tuple[oracle.Array, ...]:
    nodes = len(decays)
    numbers = np.random.default_rng(nodes)
    q, k = oracle.normalise(*numbers.normal(size=(2, nodes, 1, 4)))
    with np.errstate(divide="ignore"):
        g = np.log(np.array(decays))[:, None]
    v, state = numbers.normal(size=(nodes, 1, 2)), numbers.normal(size=(1, 2, 4))
    return q, k, v, g, np.full((nodes, 1), 0.7), state


SOLVE = {"power", "order"}  # what only the solve of a delta term can break
CORRUPTIONS = ["sibling", "ancestor", "column", *sorted(SOLVE)]


@pytest.mark.parametrize(
    ("name", "mixer"),
    [(c, m) for c in CORRUPTIONS for m in MIXERS.values() if m.delta or c not in SOLVE],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_corrupted_plan_computes_something_else(name: str, mixer: Mixer) -> None:
    tree = parse_template("parents:[-1,0,0,1,1,2,3]")
    plan = plan_tree(tree, LayerSpec(mixer=mixer))
    (block,) = plan.blocks
    assert plan.spans is not None
    spans = list(plan.spans)
    if name == "sibling":  # node 2 follows the subtree of node 1: let it in
        spans[1] = (spans[1][0], spans[2][0])
    if name == "ancestor":  # node 4 is the last of the subtree of node 1: leave it out
        spans[1] = (spans[1][0], spans[1][1] - 1)
    blocks = {
        "power": (replace(block, steps=block.steps - 1),),
        "column": (replace(block, column=False),),
        "order": (Block(0, (3, 4, 5, 6), True, 3), Block(4, (0, 1, 2), True, 3)),
    }.get(name, plan.blocks)
    wrong = replace(plan, spans=tuple(spans), blocks=blocks)
    operands = exact(np.random.default_rng(4), tree.nodes)
    (u, o), (wrong_u, wrong_o) = interpret(plan, operands), interpret(wrong, operands)
    # U starts one power ahead of O: only O needs the last one; without a delta term U is R
    assert (u != wrong_u).any() == (mixer.delta and name != "power")
    assert (o != wrong_o).any()


def test_a_tree_that_does_not_fit_is_refused_at_run_time() -> None:
    plan = plan_tree(parse_template("any:3"), depth=1)
    operands = exact(np.random.default_rng(5), 4)
    with pytest.raises(TreeError, match="needs the parents"):
        interpret(plan, operands)
    with pytest.raises(TreeError, match="4 nodes and depth 1 does not fit any:3"):
        interpret(plan, operands, [-1, 0, 0, 0])
    with pytest.raises(TreeError, match="depth 2 does not fit any:3 at depth 1"):
        interpret(plan, operands, [-1, 0, 1])

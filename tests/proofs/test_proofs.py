from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bolegen import oracle, proofs
from bolegen.codegen.pipeline import plan_template
from bolegen.errors import ProofError
from bolegen.formal import run_recurrence
from bolegen.ir import Block, Solver, TreePlan, parse_template, plan_tree, spell_template
from bolegen.proofs import prove_plan
from support.strategies import heads, one_head, trees

LONG = "(1,1,1,1,1,1,1,1,1,1,2)"  # depth 11: beyond the polynomials


@settings(max_examples=25)
@given(st.data())
def test_the_formal_recurrence_is_the_oracle(data: st.DataObject) -> None:
    tree = data.draw(trees(24))
    head = data.draw(heads(tree.nodes))
    assert tree.parents is not None
    want = oracle.recurrence(tree.parents, *head)
    u, o = run_recurrence(tree.parents, one_head(head))
    np.testing.assert_allclose(u, want.u[:, 0], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(o, want.o[:, 0], rtol=1e-11, atol=1e-11)


@settings(max_examples=15)
@given(trees(24), st.sampled_from([None, Solver.HORNER, Solver.SUBSTITUTION]))
def test_compiled_plans_of_drawn_trees_are_proven(tree: object, solver: Solver | None) -> None:
    text = spell_template(tree)  # type: ignore[arg-type]
    plan = plan_template(text, solver=solver)
    certificate = prove_plan(plan)
    assert certificate.index == plan.tree.depth + 1


@pytest.mark.parametrize("text", ["chain:0", "chain:8", "(3,3,3)", "(2,2,2,2,2)", "(63)"])
@pytest.mark.parametrize("solver", Solver)
def test_small_templates_are_proven_by_symbols(text: str, solver: Solver) -> None:
    for plan in (plan_tree(parse_template(text)), plan_template(text, solver=solver)):
        certificate = prove_plan(plan)
        assert certificate.method == "symbols"
        assert certificate.nodes == plan.tree.nodes


@pytest.mark.parametrize("text", ["chain:9", "chain:63", "(8,8)", "(2,2,2,2,2,2,2)", LONG])
def test_larger_templates_are_proven_by_residues(text: str) -> None:
    assert prove_plan(plan_template(text)).method == "residues"


@pytest.mark.parametrize("text", ["chain:511", "(511)", "(2,2,2,2,2,2,2,1,1)"])
def test_templates_of_512_nodes_are_proven(text: str) -> None:
    assert prove_plan(plan_template(text)).nodes > 300


@pytest.mark.parametrize("depth", [0, 1, 5, None])
@pytest.mark.parametrize("nodes", [1, 17, 64])
def test_runtime_templates_are_proven(nodes: int, depth: int | None) -> None:
    certificate = prove_plan(plan_template(f"any:{nodes}", depth=depth))
    assert certificate.template == f"any:{nodes}"
    assert any("every tree" in claim for claim in certificate.claims)
    assert any("sampled" in claim for claim in certificate.claims)


def test_the_certificate_says_what_was_dropped() -> None:
    text = str(prove_plan(plan_template("(3,3,3)", depth=8)))
    assert text.splitlines() == [
        "(3,3,3): 40 nodes, depth 3: proven",
        "  G^4 = 0 and G^3 is not: 3 products with G suffice, 5 of 8 vanish",
        "  (I + G) (I - G + G^2 - G^3) = I",
        "  U and O of every node equal the recurrence, as polynomials (31 terms)",
    ]


def edit_span(plan: TreePlan, node: int, last: int) -> TreePlan:
    assert plan.spans is not None
    spans = list(plan.spans)
    spans[node] = (spans[node][0], last)
    return replace(plan, spans=tuple(spans))


def let_sibling_in(plan: TreePlan) -> TreePlan:
    """Node 3 of (3,3,3) is what follows the subtree of node 2."""
    assert plan.spans is not None
    return edit_span(plan, 2, plan.spans[3][0])


def leave_ancestor_out(plan: TreePlan) -> TreePlan:
    """The last grandchild of node 2 no longer sees it."""
    assert plan.spans is not None
    return edit_span(plan, 2, plan.spans[2][1] - 1)


def drop_power(plan: TreePlan) -> TreePlan:
    deep = next(block for block in plan.blocks if block.steps)
    blocks = [replace(b, steps=b.steps - 1) if b is deep else b for b in plan.blocks]
    return replace(plan, blocks=tuple(blocks))


def drop_columns(plan: TreePlan) -> TreePlan:
    blocks = [replace(b, column=False) if b.start == 0 else b for b in plan.blocks]
    return replace(plan, blocks=tuple(blocks))


def turn_blocks(plan: TreePlan) -> TreePlan:
    return replace(plan, blocks=tuple(reversed(plan.blocks)))


def claim_fewer_steps(plan: TreePlan) -> TreePlan:
    return replace(plan, steps=plan.tree.depth - 1)


CORRUPTIONS: list[tuple[Callable[[TreePlan], TreePlan], str]] = [
    (let_sibling_in, "node 3 sees node 2, which is not an ancestor"),
    (leave_ancestor_out, "node 30 misses node 2, which is an ancestor"),
    (drop_power, "node 4: O of the plan is not the recurrence's"),
    (drop_columns, "node 1: U of the plan is not the recurrence's"),
    (claim_fewer_steps, "2 steps are too few: node 13 is at level 3"),
]


@pytest.mark.parametrize(("corrupt", "rule"), CORRUPTIONS)
def test_a_corrupted_plan_is_refuted(corrupt: Callable[[TreePlan], TreePlan], rule: str) -> None:
    with pytest.raises(ProofError, match=rule):
        prove_plan(corrupt(plan_template("(3,3,3)")))


@pytest.mark.parametrize("corrupt", [let_sibling_in, leave_ancestor_out])
@pytest.mark.parametrize("symbolic", [True, False])
def test_equality_alone_refutes_a_wrong_mask(
    corrupt: Callable[[TreePlan], TreePlan], symbolic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_prove_mask", lambda *_: None)
    monkeypatch.setattr(proofs, "_find_index", lambda *_: 4)
    monkeypatch.setattr(proofs, "SYMBOLIC_NODES", 64 if symbolic else 0)
    with pytest.raises(ProofError, match="is not the recurrence's"):
        prove_plan(corrupt(plan_template("(3,3,3)")))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize("solver", [Solver.HORNER, Solver.SUBSTITUTION])
def test_one_power_too_few_is_refuted_at_every_depth(depth: int, solver: Solver) -> None:
    plan = plan_template(f"chain:{depth}", solver=solver)
    assert prove_plan(plan).depth == depth
    with pytest.raises(ProofError, match=r"node \d+: O of the plan"):
        prove_plan(drop_power(plan))


def test_a_power_too_many_is_harmless() -> None:
    plan = plan_template("(3,3,3)")
    blocks = tuple(replace(block, steps=block.steps + 2) for block in plan.blocks)
    assert prove_plan(replace(plan, blocks=blocks)).index == 4


def test_a_node_that_no_block_holds_is_refuted() -> None:
    plan = plan_tree(parse_template("(2,2)"))
    lost = replace(plan, blocks=(Block(0, (0, 1, 2, 3, 4, 5, -1), True, 2),))
    with pytest.raises(ProofError, match="node 6: U"):
        prove_plan(lost)


def test_column_blocks_before_those_of_their_ancestors_are_refuted() -> None:
    with pytest.raises(ProofError, match="is not the recurrence's"):
        prove_plan(turn_blocks(plan_template("chain:40")))


def test_runtime_blocks_that_fail_some_tree_are_refuted() -> None:
    plan = plan_template("any:40", depth=20, solver=Solver.SUBSTITUTION)
    with pytest.raises(ProofError, match="ancestors in its own block"):
        prove_plan(drop_power(plan))
    with pytest.raises(ProofError, match="node 0 may have children"):
        prove_plan(drop_columns(plan))
    with pytest.raises(ProofError, match="node 0 is not in its place"):
        prove_plan(turn_blocks(plan))
    last = plan.blocks[-1]
    lost = replace(last, nodes=tuple(-1 if node == 39 else node for node in last.nodes))
    with pytest.raises(ProofError, match="node 39 is not in its place"):
        prove_plan(replace(plan, blocks=(*plan.blocks[:-1], lost)))


def test_a_wrong_recurrence_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_decay(parents, operands, mixer):  # type: ignore[no-untyped-def]
        one = operands.decay * 0 + 1
        return run_recurrence(parents, replace(operands, decay=one), mixer)

    monkeypatch.setattr(proofs, "run_recurrence", forget_decay)
    for text in ("chain:2", "chain:12"):
        with pytest.raises(ProofError, match="node 0: U"):
            prove_plan(plan_template(text))

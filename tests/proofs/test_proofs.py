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
    spell_template,
)
from bolegen.proofs import prove_plan
from support.strategies import heads, one_head, trees

LONG = "(1,1,1,1,1,1,1,1,1,1,2)"  # depth 11: beyond the polynomials
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())


def planned(text: str, mixer: Mixer, depth: int | None = None) -> TreePlan:
    return plan_template(text, LayerSpec(mixer=mixer), depth=depth)


@every_mixer
@settings(max_examples=10)
@given(st.data())
def test_the_formal_recurrence_is_the_oracle(mixer: Mixer, data: st.DataObject) -> None:
    tree = data.draw(trees(24))
    head = data.draw(heads(tree.nodes, mixer))
    assert tree.parents is not None
    want = oracle.recurrence(tree.parents, *head, mixer=mixer)
    u, o = run_recurrence(tree.parents, one_head(head, tree.parents), mixer)
    np.testing.assert_allclose(u, want.u[:, 0], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(o, want.o[:, 0], rtol=1e-11, atol=1e-11)


@every_mixer
@settings(max_examples=6)
@given(trees(24), st.sampled_from([None, Solver.HORNER, Solver.SUBSTITUTION]))
def test_compiled_plans_of_drawn_trees_are_proven(
    mixer: Mixer, tree: TreeTemplate, solver: Solver | None
) -> None:
    solver = solver if mixer.delta else None
    plan = plan_template(spell_template(tree), LayerSpec(mixer=mixer), solver=solver)
    assert prove_plan(plan).index == (plan.tree.depth + 1 if mixer.delta else 1)


@every_mixer
@pytest.mark.parametrize(
    ("text", "method"), [("(3,3,3)", "symbols"), ("(2,2,2,2,2,2,2)", "residues")]
)
def test_every_mixer_is_proven_either_way(text: str, method: str, mixer: Mixer) -> None:
    certificate = prove_plan(planned(text, mixer))
    assert certificate.method == method
    assert certificate.claims[-1].startswith(("U and O of every node", "(I + G) U = R, and U and"))
    assert any("G = 0" in claim for claim in certificate.claims) != mixer.delta


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


@every_mixer
@pytest.mark.parametrize(("nodes", "depth"), [(1, 0), (17, 1), (17, None), (64, 5), (64, None)])
def test_runtime_templates_are_proven(nodes: int, depth: int | None, mixer: Mixer) -> None:
    certificate = prove_plan(planned(f"any:{nodes}", mixer, depth))
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


def lose_node(plan: TreePlan) -> TreePlan:
    """The last block forgets one of its nodes."""
    *others, last = plan.blocks
    kept = [node for node in last.nodes if node >= 0][:-1]
    padded = (*kept, *[-1] * (last.rows - len(kept)))
    return replace(plan, blocks=(*others, replace(last, nodes=padded)))


# what there is to break without a solve, and with one
STRUCTURE = [let_sibling_in, leave_ancestor_out, drop_columns, lose_node]


@every_mixer
@pytest.mark.parametrize("corrupt", STRUCTURE)
@pytest.mark.parametrize("symbolic", [True, False])
def test_equality_alone_refutes_a_wrong_structure(
    corrupt: Callable[[TreePlan], TreePlan],
    symbolic: bool,
    mixer: Mixer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proofs, "_prove_mask", lambda *_: None)
    monkeypatch.setattr(proofs, "_find_index", lambda *_: 4)
    monkeypatch.setattr(proofs, "SYMBOLIC_NODES", 64 if symbolic else 0)
    with pytest.raises(ProofError, match="is not the recurrence's"):
        prove_plan(corrupt(planned("(3,3,3)", mixer)))


@every_mixer
def test_a_wrong_mask_is_named_whatever_the_mixer(mixer: Mixer) -> None:
    for corrupt, rule in CORRUPTIONS[:2]:
        with pytest.raises(ProofError, match=rule):
            prove_plan(corrupt(planned("(3,3,3)", mixer)))


@every_mixer
def test_runtime_blocks_without_columns_or_a_node_are_refuted(mixer: Mixer) -> None:
    plan = planned("any:40", mixer, 5)
    with pytest.raises(ProofError, match="node 0 may have children, but its block has no columns"):
        prove_plan(drop_columns(plan))
    with pytest.raises(ProofError, match="node 39 is not in its place"):
        prove_plan(lose_node(plan))
    with pytest.raises(ProofError, match="node 0 is not in its place"):
        prove_plan(turn_blocks(plan))


@every_mixer
def test_sampled_trees_alone_refute_a_lost_column(
    mixer: Mixer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_check_any_tree", lambda _: None)
    for corrupt in (drop_columns, lose_node):
        with pytest.raises(ProofError, match="is not the recurrence's"):
            prove_plan(corrupt(planned("any:40", mixer, 5)))


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


@every_mixer
@pytest.mark.parametrize("term", ["decay", "beta", "delta"])
def test_a_wrong_recurrence_would_not_pass(
    term: str, mixer: Mixer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(parents, operands, mixer):  # type: ignore[no-untyped-def]
        if term == "delta":
            return run_recurrence(parents, operands, replace(mixer, delta=not mixer.delta))
        one = {term: getattr(operands, term) * 0 + 1}
        return run_recurrence(parents, replace(operands, **one), mixer)

    monkeypatch.setattr(proofs, "run_recurrence", forget)
    if term == "decay" and not mixer.scales_state:
        assert prove_plan(planned("chain:2", mixer)).nodes == 3
        return
    for text in ("chain:2", "chain:12", "any:9"):
        with pytest.raises(ProofError, match=r"node 0: [UO]"):
            prove_plan(planned(text, mixer))

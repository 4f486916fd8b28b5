import json
import re
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bolegen.errors import SpecError, TreeError
from bolegen.ir import (
    MAX_NODES,
    Solver,
    TreeTemplate,
    parse_template,
    plan_tree,
    slug,
    spell_template,
)
from support.strategies import trees


@given(trees(64))
def test_notation_round_trips(tree: TreeTemplate) -> None:
    assert parse_template(spell_template(tree)) == tree
    assert parse_template(f"parents:{json.dumps(tree.parents)}") == tree
    assert f"m_{slug(tree)}".isidentifier()


@given(st.integers(1, MAX_NODES))
def test_runtime_notation_round_trips(nodes: int) -> None:
    tree = parse_template(f"any:{nodes}")
    assert tree == TreeTemplate.runtime(nodes)
    assert not tree.is_static
    assert spell_template(tree) == f"any:{nodes}"


@given(trees(48))
def test_edges_in_any_order_give_the_tree_back(tree: TreeTemplate) -> None:
    edges = [(tree.path(n)[-2], n) for n in range(1, tree.nodes)]
    if not edges:
        return
    again = TreeTemplate.from_edges([(f"n{p}", f"n{c}") for p, c in reversed(edges)])  # type: ignore[misc]
    assert sorted(again.levels) == sorted(tree.levels)
    assert again.depth == tree.depth


@given(trees(48))
def test_spans_are_the_ancestor_relation(tree: TreeTemplate) -> None:
    spans = plan_tree(tree).spans
    assert spans is not None
    for i in range(tree.nodes):
        sees = {j for j in range(tree.nodes) if spans[j][0] < spans[i][0] <= spans[j][1]}
        assert sees == set(tree.path(i)[:-1])


@given(trees(32))
def test_networkx_view_agrees(tree: TreeTemplate) -> None:
    import networkx as nx

    assert nx.is_arborescence(tree.graph)
    assert nx.dag_longest_path_length(tree.graph) == tree.depth
    assert {n for n, degree in tree.graph.out_degree() if degree} == set(tree.internal)
    with pytest.raises(nx.NetworkXError):
        tree.graph.add_node(99)


@pytest.mark.parametrize(
    ("text", "nodes", "depth"),
    [
        ("(3,3,3)", 40, 3),
        (" ( 3 , 3 , 3 , ) ", 40, 3),
        ("(3)", 4, 1),
        ("chain:0", 1, 0),
        ("chain:8", 9, 8),
        ("chain:511", 512, 511),
        ("(511)", 512, 1),
        ("parents:[-1,0,0,1,2]", 5, 2),
        ("parents:[-1]", 1, 0),
        ("any:64", 64, 63),
    ],
)
def test_nodes_and_depth_of_a_template(text: str, nodes: int, depth: int) -> None:
    tree = parse_template(text)
    assert (tree.nodes, tree.depth) == (nodes, depth)


@pytest.mark.parametrize("text", ["chain:3", "(1,1,1)", "parents:[-1,0,1,2]"])
def test_one_topology_is_one_value_however_it_is_spelled(text: str) -> None:
    tree = parse_template(text)
    assert tree == TreeTemplate.from_parents([-1, 0, 1, 2])
    assert spell_template(tree) == "chain:3"
    assert tree.digest == TreeTemplate.from_branching([1, 1, 1]).digest


def test_a_tree_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        parse_template("(2,2)").nodes = 3  # type: ignore[misc]


BROKEN = {
    "orphan": ("parents:[-1,0,7]", "node 2 is an orphan: its parent 7"),
    "orphan below zero": ("parents:[-1,0,-3]", "node 2 is an orphan: its parent -3"),
    "cycle": ("parents:[-1,1]", "node 1 is its own parent, a cycle"),
    "longer cycle": ("parents:[-1,2,1]", "node 1 has parent 2; parents come before children"),
    "two roots": ("parents:[-1,0,-1]", "node 2 has parent -1, a second root"),
    "forward parent": ("parents:[-1,3,0,0]", "node 1 has parent 3; parents come before"),
    "no root": ("parents:[0,0]", "node 0 is the root, so its parent is -1"),
    "no nodes": ("parents:[]", "at least its root"),
    "no runtime nodes": ("any:0", "1 to 512 nodes, not 0"),
    "too many runtime nodes": ("any:513", "at most 512 nodes"),
    "a million nodes": ("any:1000000", "at most 512 nodes"),
    "a long chain": ("chain:512", "at most 512 nodes"),
    "a million levels": ("chain:1000000", "at most 512 nodes"),
    "a million children": ("(1000000)", "at most 512 nodes"),
    "wide": ("(512)", "more than 512 nodes"),
    "deep and wide": ("(9,9,9,9,9,9,9,9,9,9)", "more than 512 nodes"),
    "no children": ("(3,0)", "branching at level 1 is 0"),
    "empty branching": ("()", "empty; a root alone is chain:0"),
    "hole": ("(3,,3)", "whole number"),
    "negative": ("chain:-1", "whole number"),
    "not whole": ("parents:[-1,0.0]", "list of whole numbers"),
    "truth is no number": ("parents:[-1,false]", "list of whole numbers"),
    "text is no number": ('parents:[-1,"0"]', "list of whole numbers"),
    "no list": ("parents:7", "list of whole numbers"),
    "no JSON": ("parents:[-1,0", "needs a list such as"),
    "nested": ("parents:" + "[" * 4000, "needs a list such as"),
    "no file": ("file:/nonexistent/tree.json", "cannot be read"),
    "folder": ("file:/", "cannot be read"),
    "empty": ("", "cannot read the template"),
    "word": ("tree", "cannot read the template"),
    "no brackets": ("3,3,3", "cannot read the template"),
    "other digits": ("chain:٣", "whole number"),
    "huge": ("(" + "3," * 10_000 + ")", "at most 8192 are read"),
    "code": ("__import__('os').system('false')", "cannot read the template"),
    "code in branching": ("(__import__('os').getpid())", "whole number"),
    "code in parents": ("parents:[-1,exit()]", "needs a list such as"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_tree_is_refused_by_its_rule(name: str) -> None:
    text, rule = BROKEN[name]
    with pytest.raises(TreeError) as caught:
        parse_template(text)
    message = str(caught.value)
    assert rule in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_million_parents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="1 to 512 nodes, not 1000000"):
        TreeTemplate.from_parents(range(-1, 10**6 - 1))
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(list(range(-1, 10**6 - 1))))
    with pytest.raises(TreeError, match="larger than 1 MiB"):
        parse_template(f"file:{path}")


@given(st.text(max_size=200))
def test_any_text_is_a_tree_or_a_tree_error(text: str) -> None:
    try:
        tree = parse_template(text)
    except TreeError:
        return
    assert 1 <= tree.nodes <= MAX_NODES


@given(st.lists(st.integers(-2, 20), max_size=20))
def test_any_parents_are_a_tree_or_a_tree_error(parents: list[int]) -> None:
    try:
        tree = TreeTemplate.from_parents(parents)
    except TreeError:
        return
    assert all(tree.path(node)[0] == 0 for node in range(tree.nodes))


def test_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("text was evaluated")

    for name in ("eval", "exec"):
        monkeypatch.setattr("builtins." + name, refuse, raising=True)
    mark = tmp_path / "mark"
    for text in (f"(open('{mark}','w'))", f"parents:[open('{mark}','w')]", "any:exit()"):
        with pytest.raises(TreeError):
            parse_template(text)
    assert not mark.exists()


@pytest.mark.parametrize("content", ["[-1, 0, 0]", '{"parents": [-1, 0, 0], "name": "fan"}'])
def test_a_file_holds_parents(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tree.json"
    path.write_text(content)
    assert parse_template(f"file:{path}") == TreeTemplate.from_parents([-1, 0, 0])


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b"[-1, 5]", b'"[-1]"'])
def test_a_file_that_holds_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tree.json"
    path.write_bytes(content)
    with pytest.raises(TreeError):
        parse_template(f"file:{path}")


@pytest.mark.parametrize(
    "edges", [[], [(0, 1), (2, 1)], [(0, 1), (1, 0)], [(0, 1), (2, 3)], [(0, 0)]]
)
def test_edges_that_are_no_tree_are_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(TreeError, match="one rooted tree"):
        TreeTemplate.from_edges(edges)


def test_a_runtime_template_has_no_topology_to_ask_for() -> None:
    tree = parse_template("any:8")
    for ask in ("levels", "children", "internal", "graph"):
        with pytest.raises(TreeError, match="no topology before run time"):
            getattr(tree, ask)


def test_a_depth_below_the_template_s_is_refused() -> None:
    with pytest.raises(SpecError, match="depth 2 is smaller than the template's 3"):
        plan_tree(parse_template("(3,3,3)"), depth=2)
    with pytest.raises(SpecError, match="negative"):
        plan_tree(parse_template("any:8"), depth=-1)
    with pytest.raises(SpecError, match="levels needs a static template"):
        plan_tree(parse_template("any:8"), solver=Solver.LEVELS)
    assert plan_tree(parse_template("(3,3,3)"), depth=8).steps == 8


def test_the_deepest_tree_needs_no_recursion() -> None:
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(200)
        plan = plan_tree(parse_template("chain:511"))
    finally:
        sys.setrecursionlimit(limit)
    assert plan.spans is not None
    assert plan.spans[511] == (511, 511)


def test_a_long_branching_still_has_a_short_name() -> None:
    name = slug(parse_template("(2" + ",1" * 121 + ")"))
    assert re.fullmatch(r"tree245_[0-9a-f]{8}", name)

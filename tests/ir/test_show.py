import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings

from bolegen.ir import TreeTemplate, draw_svg, parse_template, show_tree
from support.strategies import trees

SVG = "{http://www.w3.org/2000/svg}"
TEMPLATES = ["chain:0", "chain:8", "(3,3,3)", "(63)", "(2,2,2,2,2,2,2)", "chain:511", "(511)"]


def mask_of(text: str) -> list[str]:
    """Rows of the mask in ``text``, without their numbers."""
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("ancestor mask"))
    return [line.split()[1] for line in lines[first + 1 :]]


def test_a_small_tree_is_drawn_whole() -> None:
    assert show_tree(parse_template("parents:[-1,0,0,1,1,2,3,5]")).splitlines() == [
        "parents:[-1,0,0,1,1,2,3,5]: 8 nodes, depth 3",
        "",
        "0",
        "├─ 1",
        "│  ├─ 3 ─ 6",
        "│  └─ 4",
        "└─ 2 ─ 5 ─ 7",
        "",
        "nodes by level: 1, 2, 3, 2",
        "with children: 5 of 8, the only columns of G",
        "",
        "ancestor mask: node (row) sees its ancestors and itself (columns)",
        "0 █",
        "1 ██",
        "2 █·█",
        "3 ██·█",
        "4 ██··█",
        "5 █·█··█",
        "6 ██·█··█",
        "7 █·█··█·█",
    ]


@given(trees(48))
def test_text_shows_every_node_and_exactly_its_ancestors(tree: TreeTemplate) -> None:
    text = show_tree(tree)
    drawing = text.split("\n\n")[1]
    names = drawing.translate(str.maketrans("├│└─", "    ")).split()
    if "..." not in names:
        assert sorted(map(int, names)) == list(range(tree.nodes))
    for node, row in enumerate(mask_of(text)):
        assert {j for j, mark in enumerate(row) if mark == "█"} == set(tree.path(node))


@pytest.mark.parametrize("text", TEMPLATES)
def test_text_stays_readable_at_any_size(text: str) -> None:
    shown = show_tree(parse_template(text))
    assert len(shown.splitlines()) < 200
    assert max(map(len, shown.splitlines())) < 140
    assert len(mask_of(shown)) <= 64
    assert parse_template(text).nodes == int(shown.split(": ")[1].split()[0])


def test_shades_count_pairs() -> None:
    rows = mask_of(show_tree(parse_template("chain:511")))
    assert rows[0] == "▒"  # 36 of 64 pairs
    assert set(rows[63][:-1]) == {"█"}
    fan = mask_of(show_tree(parse_template("(511)")))
    assert fan[10][0] == "░"
    assert set(fan[10][1:-1]) == {"·"}


@pytest.mark.parametrize("draw", [show_tree, draw_svg])
def test_runtime_topology_says_so(draw) -> None:  # type: ignore[no-untyped-def]
    assert "any:64: at most 64 nodes, topology is given at run time" in draw(
        parse_template("any:64")
    )


@settings(max_examples=25)
@given(trees(64))
def test_svg_is_well_formed_and_draws_every_node_and_pair(tree: TreeTemplate) -> None:
    text = draw_svg(tree)
    assert text == draw_svg(TreeTemplate.from_parents(tree.parents or ()))
    root = ET.fromstring(text)
    assert len(root.findall(f".//{SVG}circle")) == tree.nodes
    _, mask = root.findall(f"{SVG}g")
    cells = sum(path.attrib["d"].count("M") for path in mask.findall(f"{SVG}path"))
    assert cells == sum(level + 1 for level in tree.levels)


@pytest.mark.parametrize("text", TEMPLATES)
def test_svg_stays_small_and_on_its_page(text: str) -> None:
    svg = draw_svg(parse_template(text))
    assert len(svg) < 150_000
    root = ET.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    tree, mask = root.findall(f"{SVG}g")
    box = mask.find(f"{SVG}rect")
    assert box is not None
    left, top = map(float, tree.attrib["transform"][10:-1].split())
    for circle in tree.findall(f"{SVG}circle"):
        assert 0 < left + float(circle.attrib["cx"]) < width
        assert 0 < top + float(circle.attrib["cy"]) < height
    left, top = map(float, mask.attrib["transform"][10:-1].split())
    assert left + float(box.attrib["width"]) < width
    assert top + float(box.attrib["height"]) < height

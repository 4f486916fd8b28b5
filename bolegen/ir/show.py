"""Pictures of a tree for people: text for a terminal, SVG for a page."""

from collections.abc import Iterable, Iterator

from bolegen.ir.notation import spell_template
from bolegen.ir.tree import TreeTemplate

__all__ = ["draw_svg", "show_tree"]

_MOST_LINES = 96  # of a drawing in text
_MOST_COLUMNS = 64  # of a mask in text
_SHADES = "·░▒▓█"
_GAPS = 4.0  # cells of a mask have gaps and rows have labels from here up, in pixels
_LABEL = 13.0  # least distance of two nodes that are labelled, in pixels
# of levels, from the root down; between them colours are mixed
_COLOURS = ((31, 58, 108), (35, 122, 148), (72, 168, 122), (222, 163, 62), (205, 92, 62))


def show_tree(tree: TreeTemplate) -> str:
    """The tree, its levels and its ancestor mask as text.

    A node with one child has it on the same line. Above 64 nodes a character of the mask
    stands for a square of pairs; ``any:N`` has nothing to draw before run time.
    """
    if not tree.is_static:
        return f"{_title(tree)}\n"
    counts = [tree.levels.count(level) for level in range(tree.depth + 1)]
    shown = [str(count) for count in counts]
    if len(counts) > 2 * 12:
        shown = [*shown[:12], f"... ({len(counts)} levels)", *shown[-2:]]
    mask, square = _mask_lines(tree)
    scale = f", a character is {square} x {square} pairs" if square > 1 else ""
    parts = [
        _title(tree),
        "",
        *_tree_lines(tree),
        "",
        f"nodes by level: {', '.join(shown)}",
        f"with children: {len(tree.internal)} of {tree.nodes}, the only columns of G",
        "",
        f"ancestor mask: node (row) sees its ancestors and itself (columns){scale}",
        *mask,
    ]
    return "\n".join(parts) + "\n"


def draw_svg(tree: TreeTemplate) -> str:
    """A standalone SVG picture: the tree beside its ancestor mask, coloured by level.

    The path of one deepest node is drawn strongly in both. The text depends on the topology
    alone.
    """
    if not tree.is_static:
        return _page(620, 96, [_text(24, 54, _title(tree), "t")])
    cell = max(1.0, min(24.0, 560 / tree.nodes))
    side = max(cell * tree.nodes, 180.0)
    places, width = _place_nodes(tree, side)
    left, top = 36.0, 92.0
    right = left + width + 72
    body = [
        _text(24, 36, _title(tree), "t"),
        _text(left - 12, top - 26, "tree: colour is the level", "c"),
        _text(right, top - 26, "row sees column: its ancestors, and itself (pale)", "c"),
        f'<g transform="translate({_n(left)} {_n(top)})">',
        *_tree_shapes(tree, places),
        "</g>",
        f'<g transform="translate({_n(right)} {_n(top)})">',
        *_mask_shapes(tree, cell),
        "</g>",
    ]
    return _page(max(right + max(side, 300) + 36, 640), top + side + 36, body)


def _title(tree: TreeTemplate) -> str:
    name = spell_template(tree)
    if not tree.is_static:
        return f"{name}: at most {tree.nodes} nodes, topology is given at run time"
    if len(name) > 60:
        name = f"tree {tree.digest}"
    nodes = "1 node" if tree.nodes == 1 else f"{tree.nodes} nodes"
    return f"{name}: {nodes}, depth {tree.depth}"


# text


def _tree_lines(tree: TreeTemplate) -> list[str]:
    lines: list[str] = []
    stack = [(0, "", "")]
    drawn = 0
    while stack and len(lines) < _MOST_LINES:
        node, before, after = stack.pop()
        run = _run(tree, node)
        drawn += len(run)
        lines.append(before + _spell_run(run))
        children = tree.children[run[-1]]
        for child in reversed(children):
            last = child == children[-1]
            stack.append(
                (child, after + ("└─ " if last else "├─ "), after + ("   " if last else "│  "))
            )
    if stack:
        lines.append(f"... and {tree.nodes - drawn} more nodes")
    return lines


def _run(tree: TreeTemplate, node: int) -> list[int]:
    """``node`` and its descendants, as long as there is only one."""
    run = [node]
    while len(tree.children[run[-1]]) == 1:
        run.append(tree.children[run[-1]][0])
    return run


def _spell_run(run: list[int]) -> str:
    shown = [str(node) for node in run]
    if len(run) > 12:
        shown = [*shown[:6], "...", *shown[-2:]]
    return " ─ ".join(shown)


def _mask_lines(tree: TreeTemplate) -> tuple[list[str], int]:
    """Lines of the mask and the side of the square of pairs behind one character."""
    square = -(-tree.nodes // _MOST_COLUMNS)
    side = -(-tree.nodes // square)
    counts = [[0] * side for _ in range(side)]
    for node in range(tree.nodes):
        for above in tree.path(node):
            counts[node // square][above // square] += 1
    digits = len(str(tree.nodes - 1))
    return [
        f"{row * square:>{digits}} " + "".join(_shade(count, square) for count in line[: row + 1])
        for row, line in enumerate(counts)
    ], square


def _shade(count: int, square: int) -> str:
    """From no pair to every pair of a square; a single pair is either."""
    return _SHADES[0 if count == 0 else max(1, 4 * count // (square * square))]


# SVG


def _place_nodes(tree: TreeTemplate, height: float) -> tuple[list[tuple[float, float]], float]:
    """Where each node is drawn, and how wide the tree is, in pixels."""
    x = [0.0] * tree.nodes
    leaves = 0
    for node in _preorder(tree):
        if not tree.children[node]:
            x[node] = float(leaves)
            leaves += 1
    for node in reversed(tree.internal):
        below = [x[child] for child in tree.children[node]]
        x[node] = (below[0] + below[-1]) / 2
    gap = max(1.5, min(26.0, 760 / leaves))
    # a narrow tree stands in the middle of the least width
    width = max(gap * (leaves - 1), 140.0)
    shift = (width - gap * (leaves - 1)) / 2
    row = min(120.0, height / max(tree.depth, 1))
    places = [(shift + gap * at, row * level) for at, level in zip(x, tree.levels, strict=True)]
    return places, width


def _preorder(tree: TreeTemplate) -> Iterator[int]:
    stack = [0]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(tree.children[node]))


def _tree_shapes(tree: TreeTemplate, places: list[tuple[float, float]]) -> Iterator[str]:
    chosen = set(_chosen(tree))
    edges = [(parent, child) for parent in tree.internal for child in tree.children[parent]]
    for strong, style in ((False, "e"), (True, "p")):
        curves = [_curve(places[p], places[c]) for p, c in edges if (c in chosen) == strong]
        if curves:
            yield f'<path class="{style}" d="{"".join(curves)}"/>'
    room = _room(tree, places)
    radius = max(1.2, min(10.0, 0.42 * room))
    for node, (x, y) in enumerate(places):
        mark = ' class="s"' if node in chosen and radius > 3 else ""
        fill = _colour(tree, tree.levels[node])
        yield f'<circle{mark} cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"/>'
        if room >= _LABEL:
            yield _text(x, y + 3.2, str(node), "n")


def _room(tree: TreeTemplate, places: list[tuple[float, float]]) -> float:
    """The least distance of two nodes on a level or of two levels."""
    room = 26.0
    latest: dict[int, float] = {}
    for node in _preorder(tree):
        x, level = places[node][0], tree.levels[node]
        if level in latest:
            room = min(room, x - latest[level])
        latest[level] = x
    if tree.depth:
        room = min(room, places[tree.children[0][0]][1])
    return room


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x0, y0), (x1, y1) = start, end
    middle = _n((y0 + y1) / 2)
    return f"M{_n(x0)} {_n(y0)}C{_n(x0)} {middle} {_n(x1)} {middle} {_n(x1)} {_n(y1)}"


def _mask_shapes(tree: TreeTemplate, cell: float) -> Iterator[str]:
    """One path of cells for each level of the ancestors, which is a colour."""
    side = cell * tree.nodes
    yield f'<rect class="b" width="{_n(side)}" height="{_n(side)}"/>'
    own = "".join(_cells(node, node, 1, cell) for node in range(tree.nodes))
    yield f'<path class="d" d="{own}"/>'
    by_level: list[list[str]] = [[] for _ in range(tree.depth)]
    for column, rows in enumerate(_below(tree)):
        for first, count in _runs(rows) if cell < _GAPS else ((row, 1) for row in rows):
            by_level[tree.levels[column]].append(_cells(column, first, count, cell))
    for level, cells in enumerate(by_level):
        yield f'<path fill="{_colour(tree, level)}" d="{"".join(cells)}"/>'
    node = _chosen(tree)[-1]
    y, high = _n(cell * node - 1), _n(cell + 2)
    yield f'<rect class="m" x="-1" y="{y}" width="{_n(side + 2)}" height="{high}"/>'
    every = -(-16 // int(cell)) if cell >= _GAPS else tree.nodes
    for label in sorted({node, *range(0, tree.nodes, every)}):
        # next to the marked row there may be no room
        if label == node or abs(label - node) * cell >= 11:
            yield _text(-6, cell * (label + 0.5) + 3.2, str(label), "k")


def _below(tree: TreeTemplate) -> list[list[int]]:
    """Descendants of each node, in node order."""
    below: list[list[int]] = [[] for _ in range(tree.nodes)]
    for node in range(tree.nodes):
        for above in tree.path(node)[:-1]:
            below[above].append(node)
    return below


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """First row and length of each run of rows that follow one another."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield rows[start], end - start
            start = end


def _cells(column: int, row: int, count: int, cell: float) -> str:
    """A rectangle one cell wide and ``count`` high; large cells leave a gap between them."""
    size = _n(cell * (0.9 if cell >= _GAPS else 1))
    high = size if count == 1 else _n(cell * count)
    return f"M{_n(cell * column)} {_n(cell * row)}h{size}v{high}h-{size}z"


def _chosen(tree: TreeTemplate) -> tuple[int, ...]:
    """The path that is drawn strongly: to a deepest node, the middle one of them."""
    deepest = [node for node, level in enumerate(tree.levels) if level == tree.depth]
    return tree.path(deepest[len(deepest) // 2])


def _colour(tree: TreeTemplate, level: int) -> str:
    at = level / max(tree.depth, 1) * (len(_COLOURS) - 1)
    low = min(int(at), len(_COLOURS) - 2)
    pairs = zip(_COLOURS[low], _COLOURS[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{_n(x)}" y="{_n(y)}">{text}</text>'


def _n(number: float) -> str:
    """At most one decimal, and none that is 0."""
    return f"{number + 0.0:.1f}".removesuffix(".0")


def _page(width: float, height: float, body: Iterable[str]) -> str:
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    style = (
        "text{font-family:Helvetica,Arial,sans-serif;fill:#1f2933}"
        ".t{font-size:17px;font-weight:600}.c{font-size:12px;fill:#52606d}"
        ".n{font-size:9px;fill:#fff;text-anchor:middle}.k{font-size:9px;text-anchor:end}"
        ".e,.p{fill:none;stroke:#c3ccd5;stroke-width:1.2}.p{stroke:#1f2933;stroke-width:2.4}"
        ".s{stroke:#1f2933;stroke-width:2}.b{fill:#f4f6f8}.d{fill:#ccd5de}"
        ".m{fill:none;stroke:#1f2933;stroke-width:1.4}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>\n"])

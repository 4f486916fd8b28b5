"""plan -> the blocks, row tiles and node tiles that the templates of factor and solve spell."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bolegen.ir import Block, TreePlan

__all__ = ["UNROLLED", "cut_tiles", "power", "tiles_of"]

UNROLLED = 16  # products with a diagonal block written out; more run in a loop


def cut_tiles(plan: TreePlan) -> dict[str, Any]:
    """Column blocks of Y, the rows that factor forms at a time and the nodes that solve does."""
    plan = _place_nodes(plan)
    columns = [_column(plan, block) for block in plan.columns]
    sides = {column["rows"] for column in columns}
    side = min(sides) if sides else 16
    even = len(sides) == 1 and side <= plan.tiling.b_r
    tiles = [_tile(plan, i, *cut) for i, cut in enumerate(_cuts(plan))]
    for tile in tiles:
        tile["columns"] = [t for t in tiles if t["is_column"] and t["index"] <= tile["index"]]
    starts = range(0, plan.rows, plan.tiling.b_r)
    row_tiles = [_row_tile(plan, columns, start, even) for start in starts]
    return {
        "columns": columns,
        "row_tiles": row_tiles,
        "tiles": tiles,
        "alone": len(row_tiles) == 1 and len(columns) == 1 and not plan.tiling.rolled,
        "halves": len(columns) > 1 and not plan.tiling.rolled,
        "leaves": plan.rows > plan.column_count,
        "inverted": any(block.inverted for block in plan.columns),
        "side": side,
        "batch": min(plan.tiling.b_r // side, power(len(columns))) if columns else 1,
        "steps_inside": max((block.steps for block in plan.columns), default=0),
        "unrolled": UNROLLED,
    }


def _place_nodes(plan: TreePlan) -> TreePlan:
    """Blocks that hold rows of scratch in place of nodes, and so the spans."""
    if not plan.tree.is_static or plan.spans is None:
        return plan
    rows = {node: row for row, node in enumerate(plan.places)} | {-1: -1}
    blocks = (replace(b, nodes=tuple(rows[node] for node in b.nodes)) for b in plan.blocks)
    spans = tuple(plan.spans[node] for node in plan.places)
    return replace(plan, blocks=tuple(blocks), spans=spans)


def _row_tile(
    plan: TreePlan, columns: list[dict[str, Any]], start: int, even: bool
) -> dict[str, Any]:
    """b_r rows of Y from ``start`` on, against the column blocks that they may meet."""
    b_r = plan.tiling.b_r
    blocks = [column for column in columns if column["start"] < start + b_r]
    # solve reads whole tiles of up to 64 nodes, zeros above the diagonal included
    end = 64 * tiles_of(start + b_r, 64)
    zeros = [column for column in columns if start + b_r <= column["start"] < end]
    parts: list[dict[str, Any]] = []
    done = 0
    while done < len(blocks):
        first, side = blocks[done], blocks[done]["rows"]
        # equal blocks are formed together and then taken apart
        width = min(b_r // side, power(len(blocks) - done)) if even else 1
        parts.append(
            _part(plan, first["start"], width * side)
            | {
                "index": len(parts),
                "first": done,
                "width": width,
                "blocks": blocks[done : done + width],
                "names": partial(_pair_of_names, done, len(blocks)),
            }
        )
        done += width
    return {
        "start": start,
        "rows": b_r,
        "span": _spell_span(start, b_r),
        "blocks": blocks,
        "zeros": zeros,
        "parts": parts,
        "has_columns": start < plan.column_count,
        "hoists": len(blocks) <= 4,
    }


def _pair_of_names(first: int, count: int, name: str, shift: int = 0) -> str:
    """Names of two neighbouring column blocks; one that does not exist is dropped."""
    indices = (first + shift, first + shift + 1)
    return ", ".join(f"{name}{i}" if i < count else "_" for i in indices)


def _part(plan: TreePlan, start: int, rows: int) -> dict[str, Any]:
    """Columns ``start`` to ``start + rows``, padded where there are not so many."""
    positions = [node for block in plan.columns for node in block.nodes]
    nodes = positions[start : start + rows]
    block = Block(start, tuple(nodes + [-1] * (rows - len(nodes))), True, 0)
    span = _span(plan, block, f"tl.arange(0, {rows})", "o_c")
    if span["end"] == "T":
        # positions behind the columns hold leaves
        span["nodes"] = f"tl.where(o_c < COLUMNS, {span['nodes']}, T)"
    return span | {"start": start, "rows": rows, "span": _spell_span(start, rows)}


def _spell_span(start: int, rows: int) -> str:
    span = f"tl.arange(0, {rows})"
    return f"{start} + {span}" if start else span


def _cuts(plan: TreePlan) -> list[tuple[int, int]]:
    """(start, rows) of the node tiles of solve: powers of two, columns and leaves apart."""
    # without a delta term a tile's part of Y is formed on the spot, in registers
    largest = 64 if plan.spec.mixer.delta or plan.rows > 128 else 32
    cuts, start = [], 0
    for end in (plan.column_count, plan.rows):
        while start < end:
            rows = min(largest, 1 << ((end - start).bit_length() - 1))
            cuts.append((start, rows))
            start += rows
    return cuts


def _tile(plan: TreePlan, index: int, start: int, rows: int) -> dict[str, Any]:
    """Node tile ``index`` of solve: ``rows`` positions, all of them columns or all leaves."""
    positions = [node for block in plan.blocks for node in block.nodes]
    is_column = start < plan.column_count
    block = Block(start, tuple(positions[start : start + rows]), is_column, 0)
    pair = f"{start} + o_c // 2" if start else "o_c // 2"
    return _span(plan, block, f"tl.arange(0, {rows})", "o_p") | {
        "index": index,
        "start": start,
        "label": f"positions {start} to {start + rows - 1}",
        "rows": rows,
        "span": _spell_span(start, rows),
        "is_column": is_column,
        "pairs": _span(plan, block, "o_c // 2", pair)["nodes"],
    }


def _column(plan: TreePlan, block: Block) -> dict[str, Any]:
    later = [other for other in plan.columns if other.start > block.start]
    return _span(plan, block, f"tl.arange(0, {block.rows})", "o_c") | {
        "index": plan.columns.index(block),
        "rows": block.rows,
        "start": block.start,
        "span": _spell_span(block.start, block.rows),
        "steps": block.steps,
        "later": [plan.columns.index(other) for other in later if _meets(plan, other, block)],
    }


def _span(plan: TreePlan, block: Block, row: str, position: str) -> dict[str, Any]:
    """Rows of a block's nodes: ``row`` shifted, or by ``position`` where padding lies between."""
    nodes = _real(block.nodes)
    kind = "with columns" if block.column else "without"
    if not plan.tree.is_static:
        kind = "of a topology at run time"
    label = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} {kind}"
    first = nodes[0]
    if list(block.nodes[: len(nodes)]) == list(range(first, first + len(nodes))):
        expression = row if first == 0 else f"{first} + {row}"
        return {"nodes": expression, "end": nodes[-1] + 1, "label": label}
    return {"nodes": f"_row_at({position})", "end": "T", "label": label}


def _meets(plan: TreePlan, block: Block, other: Block) -> bool:
    """Whether a node of ``block`` has an ancestor in ``other``: else that product is zero."""
    if plan.spans is None:
        return True
    spans = plan.spans
    return any(
        spans[j][0] < spans[i][0] <= spans[j][1]
        for i in _real(block.nodes)
        for j in _real(other.nodes)
    )


def _real(nodes: Sequence[int]) -> list[int]:
    return [node for node in nodes if node >= 0]


def tiles_of(count: int, tile: int) -> int:
    """Tiles that cover ``count``, the last one padded."""
    return -(-count // tile)


def power(n: int, least: int = 1) -> int:
    """The next power of two, Triton's only sizes."""
    return max(least, 1 << (n - 1).bit_length())

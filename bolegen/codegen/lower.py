"""plan -> kernels and the values that their templates spell; every decision is made here."""

from collections.abc import Mapping, Sequence
from functools import partial

from bolegen.codegen.signatures import kernels_of
from bolegen.codegen.tables import spell_parents, spell_positions, spell_table
from bolegen.ir import Block, DType, KernelModule, TreePlan, slug

__all__ = ["lower_plan", "module_name"]

_UNROLLED = 16  # products with a diagonal block written out; more run in a loop


def lower_plan(plan: TreePlan) -> KernelModule:
    """The five kernels of ``plan`` (trace, prepare, factor, solve, commit), ready to emit."""
    name = module_name(plan)
    context = _shape(plan) | _tiles(plan) | _topology(plan) | _blocks(plan) | {"name": name}
    return KernelModule(name=name, kernels=kernels_of(plan, name), context=context)


def module_name(plan: TreePlan) -> str:
    """gdn_3x3x3_d8; whatever is not the default is added: gdn_3x3x3_d8_h1x2_k32_v32_fp32."""
    spec, parts = plan.spec, [plan.spec.mixer.name, slug(plan.tree), f"d{plan.depth}"]
    if (spec.key_heads, spec.value_heads) != (16, 32):
        parts.append(f"h{spec.key_heads}x{spec.value_heads}")
    if (spec.d_k, spec.d_v) != (128, 128):
        parts += [f"k{spec.d_k}", f"v{spec.d_v}"]
    if spec.conv != 4:
        parts.append(f"w{spec.conv}")
    if spec.dtype is not DType.BF16:
        parts.append(spec.dtype.value)
    if spec.state_dtype is not DType.FP32:
        parts.append(f"s{spec.state_dtype.value}")
    if spec.factors != "replay":
        parts.append(spec.factors)
    if spec.contract != "fp32":
        parts.append(spec.contract)
    if plan.solver_is_chosen:
        parts.append(plan.solver.value)
    if plan.target is not None:
        parts.append(plan.target.name)
    return "_".join(parts)


def _shape(plan: TreePlan) -> dict[str, object]:
    spec = plan.spec
    return {
        "T": plan.tree.nodes,
        "depth": plan.depth,
        "walk": plan.tree.depth if plan.tree.is_static else plan.depth,
        "steps": plan.steps,
        "HK": spec.key_heads,
        "HV": spec.value_heads,
        "DK": spec.d_k,
        "DV": spec.d_v,
        "W": spec.conv,
        "C": spec.channels,
        "ROWS": plan.rows,
        "COLUMNS": plan.column_count,
        "ratio": spec.ratio,
        "mixer": spec.mixer.name,
        "dtype": spec.dtype.torch,
        "state_dtype": spec.state_dtype.torch,
        "contract": spec.contract,
        "factors": spec.factors,
        "replay": spec.factors == "replay",
        "scale": repr(float(spec.d_k) ** -0.5),
        "taps": tuple(range(1, spec.conv)),
        "window_p": _power(spec.conv - 1),
    }


def _tiles(plan: TreePlan) -> dict[str, object]:
    spec, tiling, precision = plan.spec, plan.tiling, plan.precision
    v_tiles = _tiles_of(spec.d_v, tiling.b_v)
    b_c = 256
    return {
        "b_n": tiling.b_n,
        "b_r": tiling.b_r,
        "b_v": tiling.b_v,
        "b_c": b_c,
        "b_k": tiling.b_k,
        "chunks": _tiles_of(_power(spec.d_k, 16), tiling.b_k),
        "fused": tiling.fused,
        "b_keep": _power(_tiles_of(spec.channels, spec.key_heads + spec.value_heads)),
        "dk_p": _power(spec.d_k, 16),
        "dv_p": _power(spec.d_v, 16),
        "hv_p": _power(spec.value_heads),
        "trace_tiles": _tiles_of(plan.tree.nodes, tiling.b_n),
        "zero_tiles": _tiles_of(plan.tree.nodes, 16),
        "row_tiles": plan.rows // tiling.b_r,
        "v_tiles": v_tiles,
        "state_tiles": spec.value_heads * v_tiles,
        "commit_tiles": spec.value_heads * v_tiles + _tiles_of(spec.channels, b_c),
        "warps_prepare": tiling.warps_prepare,
        "warps_factor": tiling.warps_factor,
        "warps_solve": tiling.warps_solve,
        "warps_commit": tiling.warps_commit,
        "stages": tiling.stages,
        "maxnreg": tiling.maxnreg,
        "dot": precision.dot,
        "hip_dot": precision.hip_dot,
        "state_terms": precision.state_terms,
        "gram": ", input_precision=DOT" if spec.dtype is DType.FP32 else "",
    }


def _topology(plan: TreePlan) -> dict[str, object]:
    tree = plan.tree
    walk = tree.depth if tree.is_static else plan.depth
    words = -(-tree.nodes // 32)
    common: dict[str, object] = {
        "static": tree.is_static,
        "path_p": _power(walk + 1),
        "walk_range": "tl.static_range" if walk <= _UNROLLED else "range",
        "words": words,
        "words_p": _power(words),
        "parent_of": partial(str.format, "_parent(parents, {})"),
    }
    if tree.parents is None or plan.spans is None:
        return common | {"node_of": str}
    positions = [node for block in plan.blocks for node in block.nodes]
    return common | {
        "node_of": partial(str.format, "_node({})"),
        "parent_lines": spell_parents(tree.parents),
        "node_lines": spell_positions(positions, tree.nodes),
        "first_lines": spell_table([first for first, _ in plan.spans]),
        "last_lines": spell_table([last for _, last in plan.spans]),
    }


def _blocks(plan: TreePlan) -> dict[str, object]:
    columns = [_column(plan, block) for block in plan.columns]
    blocks = [_row(plan, block) for block in plan.blocks]
    steps = [block.steps for block in plan.blocks if block.steps]
    applied = " then ".join(f"{n} times" for n in steps) if len(steps) <= 3 else "block by block"
    return {
        "columns": columns,
        "blocks": blocks,
        "unrolled": _UNROLLED,
        "steps_doc": applied or "no node has an ancestor in its block",
    }


def _row(plan: TreePlan, block: Block) -> Mapping[str, object]:
    earlier = [
        {
            "index": plan.blocks.index(other),
            "column": plan.column_start(other),
            "rows": other.rows,
        }
        for other in plan.columns
        if other.start < block.start and _meets(plan, block, other)
    ]
    column = plan.column_start(block) if block.column else 0
    return _span(plan, block, f"tl.arange(0, {block.rows})", "o_p") | {
        "rows": block.rows,
        "start": block.start,
        "steps": block.steps,
        "inverted": block.inverted,
        "is_column": block.column,
        "column": column,
        "earlier": earlier,
        "index": plan.blocks.index(block),
        "pairs": _span(plan, block, "o_c // 2", f"{block.start} + o_c // 2")["nodes"],
    }


def _column(plan: TreePlan, block: Block) -> Mapping[str, object]:
    return _span(plan, block, "o_c", f"{block.start} + o_c") | {
        "rows": block.rows,
        "start": block.start,
        "steps": block.steps,
        "inverted": block.inverted,
        "column": plan.column_start(block),
    }


def _span(plan: TreePlan, block: Block, row: str, position: str) -> dict[str, object]:
    """Nodes of a block: ``row`` shifted where they follow one another, else by ``position``."""
    nodes = [node for node in block.nodes if node >= 0]
    kind = "with descendants" if block.column else "leaves"
    if not plan.tree.is_static:
        kind = "topology at run time"
    if nodes == list(range(nodes[0], nodes[0] + len(nodes))):
        first, last = nodes[0], nodes[-1]
        text = f"node {first}" if first == last else f"nodes {first} to {last}"
        expression = row if first == 0 else f"{first} + {row}"
        return {"nodes": expression, "end": last + 1, "label": f"{text}, {kind}"}
    label = f"{len(nodes)} nodes from node {nodes[0]}, {kind}"
    return {"nodes": f"_node({position})", "end": "T", "label": label}


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


def _tiles_of(count: int, tile: int) -> int:
    return -(-count // tile)


def _power(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())

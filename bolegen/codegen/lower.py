"""plan -> kernels and the values that their templates spell; every decision is made here."""

from dataclasses import asdict
from functools import partial
from math import gcd

from bolegen.codegen.buffers import spell_memory
from bolegen.codegen.cut import UNROLLED, cut_tiles, power, tiles_of
from bolegen.codegen.mix import spell_mixer
from bolegen.codegen.signatures import kernels_of
from bolegen.codegen.tables import (
    keeps_tree,
    list_tables,
    reads_tree,
    spell_parents,
    spell_positions,
    spell_table,
)
from bolegen.ir import Decay, DType, KernelModule, LayerSpec, TreePlan, slug

__all__ = ["lower_plan", "module_name"]

_CHANNELS = 128  # channels that a program of prepare handles well


def lower_plan(plan: TreePlan) -> KernelModule:
    """The five kernels of ``plan`` (trace, prepare, factor, solve, commit), ready to emit."""
    name = module_name(plan)
    context = _shape(plan) | _tiles(plan) | _topology(plan) | cut_tiles(plan) | spell_memory(plan)
    context |= spell_mixer(plan) | {"name": name}
    return KernelModule(name=name, kernels=kernels_of(plan, name), context=context)


def module_name(plan: TreePlan) -> str:
    """gdn_3x3x3_d8; whatever is not the default is added: gdn_3x3x3_d8_h1x2_k32_v32_fp32."""
    spec, parts = plan.spec, [plan.spec.mixer.name, slug(plan.tree), f"d{plan.depth}"]
    if (spec.key_heads, spec.value_heads) != (16, 32):
        parts.append(f"h{spec.key_heads}x{spec.value_heads}")
    if (spec.d_k, spec.d_v) != (128, 128):
        parts += [f"k{spec.d_k}", f"v{spec.d_v}"]
    if spec.mixer.convolved and spec.conv != 4:
        parts.append(f"w{spec.conv}")
    if spec.dtype is not DType.BF16:
        parts.append(spec.dtype.value)
    if spec.state_dtype is not DType.FP32:
        parts.append(f"s{spec.state_dtype.value}")
    if spec.factors != "replay":
        parts.append(spec.factors)
    if spec.contract != "fp32":
        parts.append(spec.contract)
    if spec.readout != "split":
        parts.append(f"r{spec.readout}")
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
        "walk": _walk(plan),
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
        "dtype": spec.dtype.torch,
        "state_dtype": spec.state_dtype.torch,
        "contract": spec.contract,
        "readout": spec.readout,
        "factors": spec.factors,
        "replay": spec.factors == "replay",
        "scale": repr(float(spec.d_k) ** -0.5),
        "taps": tuple(range(1, spec.conv)),
        "taps_p": power(spec.conv),
    }


def _tiles(plan: TreePlan) -> dict[str, object]:
    spec, tiling, readout = plan.spec, plan.tiling, plan.precision.readout_terms
    nodes, v_tiles, walk = plan.tree.nodes, tiles_of(spec.d_v, tiling.b_v), _walk(plan)
    t_tiles, dk_p = tiles_of(spec.d_v, tiling.b_t), power(spec.d_k, 16)
    channel = spec.mixer.decay is Decay.CHANNEL
    # pairs of float32 take many registers a column: in chunks
    gram_b = min(32, dk_p) if spec.dtype is DType.FP32 or channel else dk_p
    pack = _pack(spec)
    programs = 2 * spec.key_heads + spec.value_heads // pack
    # under replay a state's program has v's part of the window
    windows = 2 * spec.key_heads * spec.d_k if spec.factors == "replay" else spec.channels
    return {
        **asdict(tiling),
        **asdict(plan.precision),
        "b_d": min(32, dk_p),
        "b_c": (b_c := min(512, power(windows))),
        "window_tiles": tiles_of(windows, b_c),
        "b_w": power(tiles_of(windows, spec.value_heads * v_tiles)),
        "row_alignment": gcd(16, spec.d_k * spec.dtype.bytes, spec.d_v * spec.dtype.bytes),
        "b_s": min(64, power(plan.rows)),
        "reach_terms": plan.reach_terms,
        "gate_tiles": tiles_of(nodes, tiling.b_g),
        "first_row": tiles_of(nodes, tiling.b_g)
        + spec.value_heads * tiles_of(nodes, tiling.b_h) * channel,
        "b_copy": min(64, power(nodes, 16)),
        "v_pack": pack,
        "row_programs": programs,
        "rows_p": power(pack * spec.d_v, 16),
        "b_keep": power(tiles_of(spec.channels, programs)),
        "chunks": tiles_of(dk_p, tiling.b_k),
        "early": plan.rows <= 32,
        "asked": _asks_for_y(plan),
        "half_tiles": tiles_of(tiles_of(nodes, tiling.b_n), 2),
        "hv_p": power(spec.value_heads),
        "dk_p": dk_p,
        "dv_p": power(spec.d_v, 16),
        "node_tiles": tiles_of(nodes, tiling.b_n),
        "zero_tiles": tiles_of(nodes, 16),
        "scale_tiles": tiles_of(plan.rows, min(64, power(plan.rows))),
        "v_tiles": v_tiles,
        "d_chunks": tiles_of(dk_p, 32),
        "t_tiles": t_tiles,
        "commit_tiles": spec.value_heads * t_tiles,
        "readout_how": ("", "in bf16", "in two bf16 terms")[min(readout, 2)],
        "folds": plan.precision.fold is not None,
        "precise_silu": spec.dtype is DType.FP32,
        "pairs": spec.dtype is DType.BF16,
        "gram_b": gram_b,
        "gram_chunks": tiles_of(dk_p, gram_b),
        "written_out": walk <= UNROLLED,
        "walk_p": power(max(walk, 1)),
        "gram_range": "tl.static_range" if gram_b == dk_p else "range",
        "gram": ", input_precision=DOT" if spec.dtype is DType.FP32 else "",
    }


def _pack(spec: LayerSpec) -> int:
    """Value heads whose rows one program of prepare handles: narrow ones share it."""
    pack = 1
    while 2 * pack * spec.d_v <= _CHANNELS and spec.value_heads % (2 * pack) == 0:
        pack *= 2
    return pack


def _walk(plan: TreePlan) -> int:
    """Most steps from a node to its root."""
    return plan.tree.depth if plan.tree.is_static else plan.depth


def _asks_for_y(plan: TreePlan) -> bool:
    """Whether Y, one block of 16 columns, is fetched together with the scales."""
    small = plan.tiling.fused and len(plan.columns) == 1 and plan.column_count <= 16
    return small and plan.spec.factors == "replay" and plan.spec.mixer.delta


def _topology(plan: TreePlan) -> dict[str, object]:
    tree, walk = plan.tree, _walk(plan)
    words = -(-tree.nodes // 32)
    common: dict[str, object] = {
        "static": tree.is_static,
        "path_p": power(walk + 1),
        "walk_range": "tl.static_range" if walk <= UNROLLED else "range",
        "words": words,
        "words_p": power(words),
        "parent_of": partial(str.format, "_parent(parents, {})"),
    }
    if tree.parents is None or plan.spans is None:
        free = {"row_at": str, "row_of": str, "place_of": str, "node_of": str, "places": None}
        return common | free | {"keeps_tree": None, "reads_tree": False}
    places, rows, positions = _places(plan)
    moved, read = places != list(range(tree.nodes)), reads_tree(plan)
    row_of = partial(str.format, "_row_of({})") if moved else str
    return common | {
        "keeps_tree": list_tables(plan, rows) if keeps_tree(plan) else None,
        "reads_tree": read,
        "place_of": partial(str.format, "tl.load(parents + T + {0}, mask={0} < T, other=0)")
        if read
        else row_of,
        "row_at": partial(str.format, "_row_at({})"),
        "row_of": row_of,
        "node_of": partial(str.format, "_node_of({})") if moved else str,
        "places": rows if moved else None,
        "parent_lines": spell_parents(tree.parents),
        "position_lines": spell_positions(positions, tree.nodes),
        "row_lines": spell_table(rows),
        "node_lines": spell_table(places),
        "first_lines": spell_table([plan.spans[node][0] for node in places]),
        "last_lines": spell_table([plan.spans[node][1] for node in places]),
    }


def _places(plan: TreePlan) -> tuple[list[int], list[int], list[int]]:
    """Node of each row of scratch, row of each node, and row at each padded position."""
    places = list(plan.places)
    rows = sorted(range(len(places)), key=places.__getitem__)
    positions = [rows[n] if n >= 0 else -1 for block in plan.blocks for n in block.nodes]
    return places, rows, positions

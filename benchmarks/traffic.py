# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Floors to compare with: a copy kernel, and a kernel that moves what a solve moves."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.cases import tree_depth
from benchmarks.operands import Operands, split_rows
from benchmarks.systems import System

__all__ = ["copy_seconds", "floor_bytes", "round_bytes", "traffic"]

_COPY_BYTES = 2 << 30
_BLOCKS = ((2048, 4), (4096, 8), (8192, 8))  # elements, warps


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    """One block of float32, read and written."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + o_i, tl.load(source + o_i))


@triton.jit
def traffic_kernel(
    q,
    k,
    v,
    state,
    slots,
    out,
    deltas,
    T,
    stride_t,
    stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    DELTAS: tl.constexpr,
):
    """The grid, loads and stores of a solve, and sums in place of products."""
    i_v, i_h = tl.program_id(0), tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_t = tl.arange(0, ROWS)
    o_k = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_t = (o_t < T)[:, None]
    p_state = state + tl.load(slots + i_b) * stride_slot + i_h * DV * DK
    b_s = tl.load(p_state + o_v[:, None] * DK + o_k[None, :]).to(tl.float32)
    o_r = (i_b * T + o_t)[:, None] * stride_t
    o_c = (i_h // (HV // HK)) * DK + o_k[None, :]
    b_k = tl.load(k + o_r + o_c, mask=m_t, other=0.0).to(tl.float32)
    b_q = tl.load(q + o_r + o_c, mask=m_t, other=0.0).to(tl.float32)
    b_v = tl.load(v + o_r + i_h * DV + o_v[None, :], mask=m_t, other=0.0).to(tl.float32)
    b_o = b_v + tl.sum(b_k + b_q, 1)[:, None] + tl.sum(b_s, 1)[None, :]
    p_o = (i_b * T + o_t)[:, None] * (HV * DV) + i_h * DV + o_v[None, :]
    tl.store(out + p_o, b_o.to(out.dtype.element_ty), mask=m_t)
    if DELTAS:
        tl.store(deltas + p_o, b_o, mask=m_t)


def copy_seconds(time: Callable[[Callable[[int], object]], float]) -> float:
    """Seconds that the best copy kernel takes a byte, read and write both counted.

    ``time`` gives the seconds of one call. (A memcpy in a graph is slower than these kernels.)
    """
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)

    def copy(block: int, warps: int) -> Callable[[int], Any]:
        grid = (source.numel() // block,)
        return lambda _: copy_kernel[grid](source, target, BLOCK=block, num_warps=warps)

    return min(time(copy(*shape)) for shape in _BLOCKS) / (2 * _COPY_BYTES)


def traffic(r: Operands, *, deltas: bool) -> System:
    """What a solve moves; with ``deltas`` it also stores one float32 row a node and head."""
    shape, batch, nodes = r.case.shape, r.case.batch, len(r.parents)
    out = r.x.new_empty(r.sets, batch, nodes, shape.value_heads, shape.d_v)
    stored = torch.empty_like(out, dtype=torch.float32) if deltas else [None] * r.sets
    tile = min(64, shape.d_v)

    def run(i: int) -> torch.Tensor:
        q, k, v = split_rows(r.case, r.rows[i])
        traffic_kernel[(shape.d_v // tile, shape.value_heads, batch)](
            q, k, v, r.state[i], r.slots, out[i], stored[i], nodes, q.stride(1),
            r.state.stride(1), HK=shape.key_heads, HV=shape.value_heads, DK=shape.d_k,
            DV=shape.d_v, ROWS=max(16, triton.next_power_of_2(nodes)), BV=tile, DELTAS=deltas,
            num_warps=4,
        )  # fmt: skip
        return out[i]

    def judge(_: int, got: torch.Tensor) -> dict[str, float]:
        return {"o": 0.0 if bool(got.isfinite().all()) else torch.inf}

    return System("traffic.deltas" if deltas else "traffic", run, judge)


def floor_bytes(r: Operands, *, convolved: bool) -> int:
    """Bytes that one layer must move: state once, rows, gates, outputs, what is stored a node.

    ``convolved``: rows come convolved, and of them only k and v are stored.
    """
    case, shape = r.case, r.case.shape
    nodes = case.batch * len(r.parents)
    stored = case.spec.factor_bytes
    if convolved:
        stored -= shape.key_heads * shape.d_k * r.x.element_size()  # no row of q
    row = case.spec.row_bytes + case.spec.operands * r.a.element_size() + stored
    state = shape.d_v * shape.d_k * r.state.element_size()
    out = shape.d_v * r.x.element_size()
    return case.batch * shape.value_heads * state + nodes * (row + shape.value_heads * out)


def round_bytes(r: Operands) -> int:
    """Bytes that all layers must move to commit one round and verify the next: the state read and
    written once, windows written, and the stored rows of the accepted path read.
    """
    case, shape = r.case, r.case.shape
    state = shape.value_heads * shape.d_v * shape.d_k * r.state.element_size()
    window = r.windows[0, 0].numel() * r.windows.element_size()
    path = (tree_depth(r.parents) + 1) * case.spec.factor_bytes
    return r.sets * (floor_bytes(r, convolved=False) + case.batch * (state + window + path))

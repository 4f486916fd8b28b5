# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel that counts a round where it is, on the device."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LENGTHS", "count_requests"]

# counts [LENGTHS + depth + 2] int64: rounds, requests, offered and live nodes, then one for each
# accepted length from 0
LENGTHS = 4
_LENGTHS = tl.constexpr(LENGTHS)


@triton.jit
def count_requests(
    counts,
    slots,
    last,
    live,
    parents,
    stride_p,
    nodes,
    T: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One request a program: its nodes, and the length of its accepted path.

    slots and last [B]; live [B, T] int8 and parents [B, T] as verify left them, or whatever was
    there before: no address follows from what is not a node. Grid (B).
    """
    i_b = tl.program_id(0).to(tl.int64)
    one = tl.full([], 1, tl.int64)
    if i_b == 0:
        tl.atomic_add(counts, one)
    if tl.load(slots + i_b) < 0:
        return
    o_n = tl.arange(0, WIDTH)
    b_live = tl.load(live + i_b * T + o_n, mask=o_n < T, other=0)
    tl.atomic_add(counts + 1, one)
    tl.atomic_add(counts + 2, one * nodes)
    tl.atomic_add(counts + 3, tl.sum((b_live != 0).to(tl.int64), 0))
    node = tl.load(last + i_b).to(tl.int64)
    m = (node >= 0) & (node < T)
    node = tl.where(m, node, 0)
    m = m & (tl.load(live + i_b * T + node) != 0)
    length = m.to(tl.int64)
    for _ in range(DEPTH):
        m = m & (node > 0) & (node < T)
        length += m.to(tl.int64)
        node = tl.load(parents + i_b * stride_p + node, mask=m, other=0).to(tl.int64)
    tl.atomic_add(counts + _LENGTHS + length, one)

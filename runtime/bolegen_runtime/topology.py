"""Trees on the device: from an engine's links or parents to what verify takes, in one launch.

A link leads from a node to a later one. Whatever else stands in the tensors, and whatever is not
linked to node 0, is dead: parent -1, not live, and no live node's ancestor. Nothing is copied to
the host, nothing is allocated, and any contents end in at most T steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from bolegen_runtime.arguments import INTEGERS, expect_tensor

__all__ = ["trace_links", "trace_parents"]

MOST_NODES = 512
_CHUNK = 16  # links looked at together: 16 by 256 comparisons fit into registers


def trace_links(
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    live: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Write ``parents`` [B, T] int32 and ``live`` [B, T] bool from links between n <= T nodes.

    first_child, next_sibling [B, n] int32 or int64, any strides, -1 = none (SGLang's
    retrieve_next_token and retrieve_next_sibling). slots [B], negative = a padded row, whose
    links are not read. keep [B, n] bool: a node without it is dead, and so is what hangs below;
    it may be ``live`` itself. counts [B]: the nodes of each row, the others are dead.

    A link to the node itself, to an earlier one or past the row's nodes is none; a node with two
    links to it is dead. Raises ValueError, which names the argument.
    """
    expect_tensor("first_child", first_child, (None, None), INTEGERS, None)
    shape = tuple(first_child.shape)
    expect_tensor("next_sibling", next_sibling, shape, (first_child.dtype,), first_child.device)
    _trace(first_child, next_sibling, slots, parents, live, keep, counts, name="first_child")


def trace_parents(
    given: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    live: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """The same from parents ``given`` [B, n] int32 or int64; it may be ``parents`` itself.

    A node whose parent is not an earlier node is dead, and so is what hangs below. What stands at
    node 0 is not read.
    """
    expect_tensor("given", given, (None, None), INTEGERS, None)
    _trace(given, None, slots, parents, live, keep, counts, name="given")


def _trace(
    first: torch.Tensor,
    sibling: torch.Tensor | None,
    slots: torch.Tensor,
    parents: torch.Tensor,
    live: torch.Tensor,
    keep: torch.Tensor | None,
    counts: torch.Tensor | None,
    *,
    name: str,
) -> None:
    batch, nodes = first.shape
    device = first.device
    expect_tensor("slots", slots, (batch,), INTEGERS, device, unit=True)
    expect_tensor("parents", parents, (batch, None), (torch.int32,), device, unit=True)
    room = parents.shape[1]
    if not 1 <= nodes <= room or room > MOST_NODES:
        raise ValueError(
            f"{name}: expected 1 to {min(room, MOST_NODES)} nodes, with room for at most "
            f"{MOST_NODES} in parents; got {nodes}, with room for {room}"
        )
    expect_tensor("live", live, (batch, room), (torch.bool,), device, unit=True)
    for what, tensor in (("parents", parents), ("live", live)):
        if batch > 1 and tensor.stride(0) < room:
            raise ValueError(f"{what}: expected rows apart, got strides {tensor.stride()}")
    if keep is not None:
        expect_tensor("keep", keep, (batch, nodes), (torch.bool,), device)
    if counts is not None:
        expect_tensor("counts", counts, (batch,), INTEGERS, device, unit=True)
    if not (first.is_cuda or (device.type == "cpu" and triton.knobs.runtime.interpret)):
        raise ValueError(
            f"{name}: expected a GPU tensor, or TRITON_INTERPRET=1 from the start, got {device}"
        )
    if batch == 0:
        return
    block = max(16, triton.next_power_of_2(room))
    with _on(first):
        trace_tree[(batch,)](
            first,
            sibling,
            slots,
            keep,
            counts,
            parents,
            live.view(torch.int8),
            *first.stride(),
            *((0, 0) if sibling is None else sibling.stride()),
            *((0, 0) if keep is None else keep.stride()),
            parents.stride(0),
            live.stride(0),
            nodes,
            room,
            LINKS=sibling is not None,
            BLOCK=block,
            CHUNK=_CHUNK,
            num_warps=1 if block <= 64 else 4,
        )


_NUMBERS = ["nodes", "room"] + [f"stride_{x}" for x in ("fb", "fn", "sb", "sn", "kb", "kn")]
_NUMBERS += ["stride_pb", "stride_lb"]
_POINTERS = ["first", "sibling", "slots", "keep", "counts", "parents", "live"]


# one compiled kernel for all sizes and alignments: none is left to compile when a round comes
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS
)
def trace_tree(  # type: ignore[no-untyped-def]
    first,
    sibling,
    slots,
    keep,
    counts,
    parents,
    live,
    stride_fb,
    stride_fn,
    stride_sb,
    stride_sn,
    stride_kb,
    stride_kn,
    stride_pb,
    stride_lb,
    nodes,
    room,
    LINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row: the one link to each node, twice its number and 1 for a sibling's; then upwards."""
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    count = tl.where(tl.load(slots + i_b) < 0, 0, nodes)
    if counts is not None:
        count = tl.minimum(count, tl.load(counts + i_b))
    m_n = o_n < count
    p_first = first + i_b * stride_fb
    if LINKS:
        b_low = tl.full([BLOCK], 2 * BLOCK, tl.int32)
        b_high = tl.full([BLOCK], -1, tl.int32)
        p_sibling = sibling + i_b * stride_sb
        for i_c in range(0, nodes, CHUNK):
            o_c = i_c + tl.arange(0, CHUNK)
            m_c = o_c < count
            m_on = m_n[None, :] & (o_c[:, None] < o_n[None, :])
            b_to = tl.load(p_first + o_c * stride_fn, mask=m_c, other=-1)
            m_to = m_on & (b_to[:, None] == o_n[None, :])
            b_low = tl.minimum(b_low, tl.min(tl.where(m_to, 2 * o_c[:, None], 2 * BLOCK), 0))
            b_high = tl.maximum(b_high, tl.max(tl.where(m_to, 2 * o_c[:, None], -1), 0))
            # the root has no siblings
            b_to = tl.load(p_sibling + o_c * stride_sn, mask=m_c & (o_c > 0), other=-1)
            m_to = m_on & (b_to[:, None] == o_n[None, :])
            b_low = tl.minimum(b_low, tl.min(tl.where(m_to, 2 * o_c[:, None] + 1, 2 * BLOCK), 0))
            b_high = tl.maximum(b_high, tl.max(tl.where(m_to, 2 * o_c[:, None] + 1, -1), 0))
        b_link = tl.where(b_low == b_high, b_high, -1)
    else:
        b_up = tl.load(p_first + o_n * stride_fn, mask=m_n & (o_n > 0), other=-1)
        b_link = tl.where((b_up >= 0) & (b_up < o_n), 2 * b_up, -1).to(tl.int32)
    # every thread needs every link
    p_parents = parents + i_b * stride_pb
    tl.store(p_parents + o_n, b_link, mask=o_n < room)
    tl.debug_barrier()

    p_keep = keep
    m_live = m_n
    if keep is not None:
        p_keep = keep + i_b * stride_kb
        m_live = m_live & (tl.load(p_keep + o_n * stride_kn, mask=m_n, other=0) != 0)
    b_at = o_n
    b_parent = tl.full([BLOCK], -1, tl.int32)
    m_on = m_live & (o_n > 0)
    # links lead to earlier nodes: each step does, so this ends
    while tl.max(m_on.to(tl.int32), 0) > 0:
        b_link = tl.load(p_parents + b_at, mask=m_on, other=-1)
        m_up = m_on & (b_link >= 0) & ((b_link & 1) == 0)
        b_above = b_link >> 1
        b_parent = tl.where(m_up & (b_parent < 0), b_above, b_parent)
        m_live = m_live & ((b_link >= 0) | (b_at <= 0))
        if keep is not None:
            m_live = m_live & (tl.load(p_keep + b_above * stride_kn, mask=m_up, other=1) != 0)
        b_at = tl.where(m_on & (b_link >= 0), b_above, b_at)
        m_on = m_live & (b_at > 0)
    tl.debug_barrier()
    tl.store(p_parents + o_n, tl.where(m_live, b_parent, -1), mask=o_n < room)
    tl.store(live + i_b * stride_lb + o_n, m_live.to(tl.int8), mask=o_n < room)


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches on that."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The ablation's middle step: the plugin's parallel verifier, with a state stored for every node.

After verify the state of every node is formed from the paper's P, K and U, all nodes at once, and
commit copies the accepted one. Windows are committed from rows, which takes less than windows
that are stored. Benchmarks alone use it.
"""

import importlib
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["commit_states", "install", "write_states"]

_TILE = 32  # rows of a state that a program writes


def install() -> None:
    """Let every verifier of this process store states."""
    layers: Any = importlib.import_module("bolegen_runtime.sglang.layers")
    verifier: Any = importlib.import_module("bolegen_runtime.sglang.verifier").TreeVerifier
    load, make, verify = layers.load, verifier.__init__, verifier.verify

    def keep(self: Any, spec: Any, batch: int, device: Any) -> None:
        make(self, spec, batch, device)
        (_, heads), (d_k, d_v) = spec.heads, spec.dims
        shape = spec.layers, batch, spec.bounds.nodes, heads, d_v, d_k
        self.states = torch.empty(shape, dtype=self.module.MODULE.state_dtype, device=device)

    def store(self: Any, layer: int, *args: Any) -> Any:
        out = verify(self, layer, *args)
        x, pools, slots = args[0], args[4], args[5]
        rows = slots[: min(x.shape[0] // self.states.shape[2], self.factors.batch)]
        write_states(self.module, self.factors, layer, pools[0], rows, self.states[layer])
        return out

    def commit(self: Any, pools: Any, slots: Any, last_node: Any, *tracks: Any) -> None:
        if any(track is not None for track in tracks):
            raise NotImplementedError("tracked states: start the engine without its prefix cache")
        rows = slots[: last_node.shape[0]]
        state, windows = pools
        commit_states(self.module, self.factors, self.states, state, windows, rows, last_node)
        self.metrics.count_round(self.factors, rows, last_node)

    def prewarm(self: Any, pools: Any) -> None:
        slots = self.parents.new_full((1,), -1)
        self.commit(pools, slots, slots.to(torch.int64))

    layers.load = lambda *args, **options: load(*args, **options, factors="pku")
    held = verifier.bytes.fget
    verifier.bytes = property(
        lambda self: held(self) + self.states.numel() * self.states.element_size()
    )
    verifier.__init__, verifier.verify = keep, store
    verifier.commit, verifier.prewarm = commit, prewarm


def write_states(
    m: Any, factors: Any, layer: int, state: torch.Tensor, slots: torch.Tensor, kept: torch.Tensor
) -> None:
    """States of all nodes of a verified layer, from `state` [slots, Hv, d_v, d_k] and the factors
    P, K, U of a module with the topology at run time: kept [B, N, Hv, d_v, d_k].
    """
    (key_heads, heads), (d_k, d_v), nodes = m.MODULE.heads, m.MODULE.dims, kept.shape[1]
    tile = min(_TILE, triton.next_power_of_2(d_v))
    _write_states[(triton.cdiv(d_v, tile), heads, slots.shape[0] * nodes)](
        state, slots, factors.parents, factors.gates[layer], factors.keys[layer],
        factors.u[layer], kept, state.stride(0), nodes,
        HK=key_heads, HV=heads, DK=d_k, DV=d_v, DK_P=triton.next_power_of_2(d_k), TILE=tile,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_states(
    state,
    slots,
    parents,
    gates,
    keys,
    u,
    kept,
    stride_slot,
    nodes,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_P: tl.constexpr,
    TILE: tl.constexpr,
):
    """e^{lp_i} S + sum of e^{lp_i - lp_j} u_j k_j^T over a node and its ancestors."""
    i_v, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = i_n // nodes * nodes
    slot = tl.load(slots + i_n // nodes).to(tl.int64)
    if slot < 0:
        return
    o_v = i_v * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, DK_P)
    m = (o_v < DV)[:, None] & (o_d < DK)[None, :]
    o_s = i_h * (DV * DK) + o_v[:, None] * DK + o_d[None, :]
    b_s = tl.load(state + slot * stride_slot + o_s, mask=m, other=0.0).to(tl.float32)
    b_sum = tl.zeros([TILE, DK_P], tl.float32)
    decay = tl.full([], 1.0, tl.float32)
    at = (i_n - first).to(tl.int32)
    while at >= 0:
        row = first + at
        b_k = tl.load(keys + (row * HK + i_h // (HV // HK)) * DK + o_d, mask=o_d < DK, other=0.0)
        b_u = tl.load(u + (row * HV + i_h) * DV + o_v, mask=o_v < DV, other=0.0)
        b_sum += decay * b_u[:, None] * b_k[None, :]
        decay *= tl.exp(tl.load(gates + row * HV + i_h))
        at = tl.load(parents + row)
    b_s = b_s * decay + b_sum
    tl.store(kept + i_n * (HV * DV * DK) + o_s, b_s.to(kept.dtype.element_ty), mask=m)


def commit_states(
    m: Any,
    factors: Any,
    kept: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    last_node: torch.Tensor,
) -> None:
    """Copy the accepted nodes' states [L, B, N, ...] into their slots, and write their windows."""
    layers, capacity, nodes = kept.shape[:3]
    size, channels = kept[0, 0, 0].numel(), conv_state.shape[2]
    if m.MODULE.conv != 4:
        raise NotImplementedError(f"convolutions of width 4 alone, got {m.MODULE.conv}")
    copies, block = triton.cdiv(size, 4096), 512
    _commit_states[(copies + triton.cdiv(channels, block), slots.shape[0], layers)](
        state, conv_state, kept, factors.rows, slots, last_node, factors.live, factors.parents,
        capacity, *state.stride()[:2], *conv_state.stride()[:2],
        N=nodes, SIZE=size, C=channels, COPIES=copies, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _commit_states(
    state,
    window,
    kept,
    rows,
    slots,
    last_nodes,
    live,
    parents,
    capacity,
    stride_sl,
    stride_ss,
    stride_wl,
    stride_ws,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """4,096 elements of a state each, then BLOCK channels of the window."""
    i_p, i_b, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    node = tl.load(last_nodes + i_b).to(tl.int64)
    if (slot < 0) | (node < 0) | (node >= N):
        return
    if tl.load(live + i_b * N + node) == 0:
        return
    i_row = i_l * capacity + i_b
    if i_p < COPIES:
        o = i_p * 4096 + tl.arange(0, 4096)
        b_s = tl.load(kept + (i_row * N + node) * SIZE + o, mask=o < SIZE)
        tl.store(state + i_l * stride_sl + slot * stride_ss + o, b_s, mask=o < SIZE)
        return
    o_c = (i_p - COPIES) * BLOCK + tl.arange(0, BLOCK)
    p_w = window + i_l * stride_wl + slot * stride_ws + o_c * 3
    p_rows = rows + i_row * (N * C) + o_c
    second = _above(parents + i_b * N, node)
    third = _above(parents + i_b * N, second)
    b_2 = _read(p_w, p_rows, node, o_c, C)
    b_1 = _read(p_w, p_rows, second, o_c, C)
    b_0 = _read(p_w, p_rows, third, o_c, C)
    tl.debug_barrier()
    tl.store(p_w, b_0, mask=o_c < C)
    tl.store(p_w + 1, b_1, mask=o_c < C)
    tl.store(p_w + 2, b_2, mask=o_c < C)


@triton.jit
def _above(parents, node):
    """The row before a node's on its path: above the root -1, -2 ... of the old window."""
    parent = tl.load(parents + node, mask=node > 0, other=0).to(tl.int64)
    return tl.where(node > 0, parent, node - 1)


@triton.jit
def _read(p_w, p_rows, row, o_c, C: tl.constexpr):
    """A node's row, or an entry of the old window."""
    b_x = tl.load(p_rows + row * C, mask=(o_c < C) & (row >= 0), other=0.0)
    return tl.load(p_w + 3 + row, mask=(o_c < C) & (row < 0), other=b_x)

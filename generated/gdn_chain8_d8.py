"""Tree verifier for gdn: chain:8, 9 nodes, depth 8.

template  chain:8
parents   (-1, 0, 1, 2, 3, 4, 5, 6, 7)
depth     8 supported; 8 products with G needed
proof     by support: G^9 = 0, G^8 != 0; see `bolegen prove`
layer     heads 16:32, dims 128:128, convolution 4, activations bf16, state fp32
numerics  contract fp32; state in two bf16 terms; solve and readout tf32x3
factors   replay, 16640 bytes a node (a state snapshot: 2146304)
solver    horner; blocks of 16; 16 columns of G
digest    cd19c23d4a9d2f73
compiler  bolegen 0.1.0; regenerate instead of editing; imports torch and triton only

For one value head with state S before the tree (paper: Bole, eq. 2):
    O = D_P Q S + C U,  (I + G) U = R,  R = D_beta (V - D_P K S),  G nilpotent.
Launches: trace, prepare, factor, solve; commit for all layers.
Tiles are transposed, [value, node] and [column, node]; node order is the caller's everywhere
but in the blocks of factor and solve.  Names: i_ index, o_ offsets, m_ mask, b_ on chip.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["MODULE", "Factors", "Module", "allocate", "commit", "verify", "verify_qkv"]


@dataclass(frozen=True)
class Module:
    """What this file was compiled for; shapes in elements, heads (Hk, Hv), dims (dk, dv)."""

    name: str
    mixer: str
    template: str
    parents: tuple[int, ...] | None  # None: topology at run time, at most `nodes` nodes
    nodes: int  # T, root included
    depth: int  # largest depth supported, in edges
    steps: int  # products with G that remain: its nilpotency index less one
    heads: tuple[int, int]
    dims: tuple[int, int]
    conv: int  # W
    dtype: torch.dtype
    state_dtype: torch.dtype
    contract: str
    factors: str
    schedules: tuple[str, ...]
    digest: str


MODULE = Module(
    name="gdn_chain8_d8",
    mixer="gdn",
    template="chain:8",
    parents=(-1, 0, 1, 2, 3, 4, 5, 6, 7),
    nodes=9,
    depth=8,
    steps=8,
    heads=(16, 32),
    dims=(128, 128),
    conv=4,
    dtype=torch.bfloat16,
    state_dtype=torch.float32,
    contract="fp32",
    factors="replay",
    schedules=("tiled",),
    digest="cd19c23d4a9d2f73",
)
# how pairs of float32 are multiplied; AMD has no tf32x3
DOT = "tf32x3" if torch.version.hip is None else "bf16x6"
# registers a thread of the solve, where the backend knows such a cap
CAP = {"maxnreg": 128} if torch.version.hip is None else {}

T = tl.constexpr(9)  # nodes
DEPTH = tl.constexpr(8)  # edges from the deepest node to the root
HK = tl.constexpr(16)
HV = tl.constexpr(32)
DK = tl.constexpr(128)
DV = tl.constexpr(128)
W = tl.constexpr(4)
C = tl.constexpr(8192)  # channels of a row q|k|v
ROWS = tl.constexpr(16)  # padded positions of all blocks
COLUMNS = tl.constexpr(16)  # of them, columns of G: blocks with descendants


@triton.jit
def _exp(hi, lo):
    """e^(hi + lo); the product with log2 e is kept in two floats, so large |hi| loses nothing."""
    hi = tl.where(hi < -1000.0, -1000.0, hi)  # e^-1000 is 0 already; keeps infinities out
    b_t = hi * 1.4426950216293335
    b_e = tl.fma(hi, 1.4426950216293335, -b_t) + (hi * 1.925963033500e-8 + lo * 1.4426950216293335)
    return tl.exp2(b_t) * (1.0 + b_e * 0.6931471805599453)


@triton.jit
def _add(hi, lo, b_x):
    """(hi, lo) + b_x in two floats: long sums of log decays are subtracted later."""
    b_s = hi + b_x
    b_b = b_s - hi
    return b_s, lo + ((hi - (b_s - b_b)) + (b_x - b_b))


@triton.jit
def _log_decay(b_a, b_log, b_bias):
    """g = -exp(A_log) softplus(a + dt_bias), natural logarithm, at least -1000 (a decay of 0)."""
    b_x = b_a + b_bias
    # infinities are legal, a decay of 1 or of 0, but inf - inf and 0 * inf would come of them
    b_log = tl.where(b_log > 1000.0, 1000.0, tl.where(b_log < -1000.0, -1000.0, b_log))
    b_x = tl.where(b_x > 1e30, 1e30, tl.where(b_x < -1e30, -1e30, b_x))
    b_e = _exp(-tl.abs(b_x), 0.0)
    b_s = b_e / (2.0 + b_e)
    b_z = b_s * b_s
    b_z = 1.0 + b_z * (1 / 3 + b_z * (1 / 5 + b_z * (1 / 7 + b_z * (1 / 9 + b_z * (1 / 11)))))
    b_soft = tl.where(b_x > 0.0, b_x, 0.0) + 2.0 * b_s * b_z
    # far below zero softplus(x) is e^x, which may underflow while exp(A_log) overflows
    hi, lo = _add(b_log, 0.0, b_x)
    b_g = tl.where(b_x < -20.0, -_exp(hi, lo), -_exp(b_log, 0.0) * b_soft)
    return tl.where(b_g < -1000.0, -1000.0, b_g)


@triton.jit
def _write_gate(b_b):
    """beta = sigmoid(b)."""
    b_e = _exp(-tl.abs(b_b), 0.0)
    return tl.where(b_b >= 0.0, 1.0, b_e) / (1.0 + b_e)


@triton.jit
def _silu(b_x):
    """x sigmoid(x), rounded once to the activations' dtype."""
    return (b_x * _write_gate(b_x)).to(tl.bfloat16)


@triton.jit
def _parent(parents, i):
    """Parent of node i > 0: the topology is in the code, parents is None."""
    return i - 1


@triton.jit
def _node(i):
    """Node at padded position i, 9 at padding."""
    o_n = i
    o_n = tl.where(i < 9, o_n, 9)
    return o_n


@triton.jit
def _first(i):
    """Preorder number of node i."""
    b_w = tl.full(i.shape, 0xAA, tl.int32)
    b_f = (b_w >> (i & 31)) & 1
    b_w = tl.full(i.shape, 0xCC, tl.int32)
    b_f += ((b_w >> (i & 31)) & 1) << 1
    b_w = tl.full(i.shape, 0xF0, tl.int32)
    b_f += ((b_w >> (i & 31)) & 1) << 2
    b_w = tl.full(i.shape, 0x100, tl.int32)
    b_f += ((b_w >> (i & 31)) & 1) << 3
    return b_f


@triton.jit
def _last(i):
    """Largest preorder number below node i."""
    b_w = tl.full(i.shape, 0x0, tl.int32)
    b_f = (b_w >> (i & 31)) & 1
    b_w = tl.full(i.shape, 0x0, tl.int32)
    b_f += ((b_w >> (i & 31)) & 1) << 1
    b_w = tl.full(i.shape, 0x0, tl.int32)
    b_f += ((b_w >> (i & 31)) & 1) << 2
    b_w = tl.full(i.shape, 0x1FF, tl.int32)
    b_f += ((b_w >> (i & 31)) & 1) << 3
    return b_f


@triton.jit
def _above(parents, i):
    """The position before i on its path: below the root it runs on into the window."""
    return tl.where(i > 0, _parent(parents, i), i - 1)


@triton.jit
def trace_gdn_chain8_d8(
    given_parents,
    given_live,
    slots,
    parents,
    live,
    ancestors,
    stride_pb,
    stride_pt,
    stride_lb,
    stride_lt,
    HAS_LIVE: tl.constexpr,
):
    """Which nodes are live: linked to the root by live nodes, in at most DEPTH edges.

    Writes live [B, T] int8.
    """
    i_t, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n = i_t * 8 + tl.arange(0, 8)
    m_live = (o_n < T) & (tl.load(slots + i_b) >= 0)
    if HAS_LIVE:
        p_live = given_live + i_b * stride_lb
        m_live = m_live & (tl.load(p_live + o_n * stride_lt, mask=m_live, other=0) != 0)
    b_at = o_n
    for _ in range(DEPTH):
        m_up = m_live & (b_at > 0)
        b_up = tl.where(m_up, _parent(parents, b_at), 0)
        if HAS_LIVE:
            m_live = m_live & (tl.load(p_live + b_up * stride_lt, mask=m_up, other=1) != 0)
        b_at = b_up
    m_live = m_live & (b_at <= 0)
    tl.store(live + i_b * T + o_n, m_live.to(tl.int8), mask=o_n < T)


@triton.jit
def _raw(p_x, stride_x, o_i, m_n, o_d, m_d):
    """Pre-convolution rows of the nodes at o_i, zeros where o_i lies below the root."""
    m = (m_n & (o_i >= 0))[:, None] & m_d[None, :]
    p_x = p_x + o_i.to(tl.int64)[:, None] * stride_x + o_d[None, :]
    return tl.load(p_x, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _convolve(
    p_x,
    stride_x,
    p_window,
    weight,
    bias,
    parents,
    p_rows,
    o_n,
    m_n,
    o_d,
    o_c,
    m_d,
):
    """Tree convolution of channels o_c at nodes o_n -> [B_N, D], and what commit will need.

    Node i sees itself and its W - 1 nearest ancestors, running on into the committed window.
    """
    m = m_n[:, None] & m_d[None, :]
    p_x0 = p_x + o_n.to(tl.int64)[:, None] * stride_x + o_d[None, :]
    b_x0 = tl.load(p_x0, mask=m, other=0.0)
    o_1 = _above(parents, o_n)
    o_2 = _above(parents, o_1)
    o_3 = _above(parents, o_2)
    # the committed window, oldest first: b_h1 is the newest row
    b_h3 = tl.load(p_window + o_d * (W - 1) + 0, mask=m_d, other=0.0)
    b_h2 = tl.load(p_window + o_d * (W - 1) + 1, mask=m_d, other=0.0)
    b_h1 = tl.load(p_window + o_d * (W - 1) + 2, mask=m_d, other=0.0)
    b_y = tl.zeros([8, o_d.shape[0]], tl.float32)
    if bias is not None:
        b_y += tl.load(bias + o_c, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_x3 = _raw(p_x, stride_x, o_3, m_n, o_d, m_d)
    b_x3 = tl.where((o_3 == -1)[:, None], b_h1.to(tl.float32)[None, :], b_x3)
    b_x3 = tl.where((o_3 == -2)[:, None], b_h2.to(tl.float32)[None, :], b_x3)
    b_x3 = tl.where((o_3 == -3)[:, None], b_h3.to(tl.float32)[None, :], b_x3)
    b_w = tl.load(weight + o_c * W + 0, mask=m_d, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x3, b_w[None, :], b_y)
    b_x2 = _raw(p_x, stride_x, o_2, m_n, o_d, m_d)
    b_x2 = tl.where((o_2 == -1)[:, None], b_h1.to(tl.float32)[None, :], b_x2)
    b_x2 = tl.where((o_2 == -2)[:, None], b_h2.to(tl.float32)[None, :], b_x2)
    b_w = tl.load(weight + o_c * W + 1, mask=m_d, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x2, b_w[None, :], b_y)
    b_x1 = _raw(p_x, stride_x, o_1, m_n, o_d, m_d)
    b_x1 = tl.where((o_1 == -1)[:, None], b_h1.to(tl.float32)[None, :], b_x1)
    b_w = tl.load(weight + o_c * W + 2, mask=m_d, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x1, b_w[None, :], b_y)
    b_w = tl.load(weight + o_c * W + 3, mask=m_d, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x0.to(tl.float32), b_w[None, :], b_y)
    tl.store(p_rows + (o_n + (W - 1))[:, None] * C + o_c[None, :], b_x0, mask=m)
    if tl.program_id(1) == 0:
        tl.store(p_rows + 0 * C + o_c, b_h3, mask=m_d)
        tl.store(p_rows + 1 * C + o_c, b_h2, mask=m_d)
        tl.store(p_rows + 2 * C + o_c, b_h1, mask=m_d)
    return tl.where(m, _silu(b_y), 0.0).to(tl.bfloat16)


@triton.jit
def _keep(weight, bias, kept, i_r, i_t, i_b):
    """Convolution weights and bias of 256 channels, for commit to replay with.

    Once for all rows: by the first, even where that is padded.
    """
    if (i_t == 0) & (i_b == 0):
        o_c = i_r * 256 + tl.arange(0, 256)
        m_c = o_c < C
        for i_w in tl.static_range(W):
            b_w = tl.load(weight + o_c * W + i_w, mask=m_c, other=0.0)
            tl.store(kept + o_c * (W + 1) + i_w, b_w, mask=m_c)
        b_bias = tl.zeros([256], tl.bfloat16)
        if bias is not None:
            b_bias = tl.load(bias + o_c, mask=m_c, other=0.0)
        tl.store(kept + o_c * (W + 1) + W, b_bias, mask=m_c)


@triton.jit
def _prepare_keys(
    p_q,
    p_k,
    stride_qt,
    stride_kt,
    window,
    weight,
    bias,
    parents,
    p_rows,
    p_qkv,
    p_keys,
    p_vec,
    i_k,
    o_n,
    m_n,
    CONVOLVE: tl.constexpr,
):
    """One key head: rows of q and k, their inverse norms, q.k of each node with itself."""
    o_d = tl.arange(0, 128)
    m_d = o_d < DK
    m = m_n[:, None] & m_d[None, :]
    c_q = i_k * DK
    c_k = (HK + i_k) * DK
    o_q = c_q + o_d
    o_k = c_k + o_d
    if CONVOLVE:
        p_w = window + c_q * (W - 1)
        b_q = _convolve(
            p_q, stride_qt, p_w, weight, bias, parents, p_rows, o_n, m_n, o_d, o_q, m_d
        )
        p_w = window + c_k * (W - 1)
        b_k = _convolve(
            p_k, stride_kt, p_w, weight, bias, parents, p_rows, o_n, m_n, o_d, o_k, m_d
        )
    else:
        o_t = o_n.to(tl.int64)[:, None]
        b_q = tl.load(p_q + o_t * stride_qt + o_d[None, :], mask=m, other=0.0)
        b_k = tl.load(p_k + o_t * stride_kt + o_d[None, :], mask=m, other=0.0)
        tl.store(p_rows + (o_n + (W - 1))[:, None] * C + o_k[None, :], b_k, mask=m)
    m_all = (o_n < T)[:, None] & m_d[None, :]
    tl.store(p_qkv + o_n[:, None] * C + o_q[None, :], b_q, mask=m_all)
    tl.store(p_qkv + o_n[:, None] * C + o_k[None, :], b_k, mask=m_all)
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_rk = 1.0 / tl.sqrt(tl.sum(b_k * b_k, 1) + 1e-6)
    b_rq = 0.08838834764831845 / tl.sqrt(tl.sum(b_q * b_q, 1) + 1e-6)
    p_vec = p_vec + i_k * T + o_n
    tl.store(p_vec, b_rk, mask=o_n < T)
    tl.store(p_vec + HK * T, b_rq, mask=o_n < T)
    tl.store(p_vec + 2 * HK * T, tl.sum(b_q * b_k, 1) * b_rq * b_rk, mask=o_n < T)


@triton.jit
def _prepare_values(
    p_v,
    stride_vt,
    window,
    weight,
    bias,
    parents,
    p_rows,
    p_qkv,
    i_h,
    o_n,
    m_n,
    CONVOLVE: tl.constexpr,
):
    """One value head: rows of v."""
    o_d = tl.arange(0, 128)
    m_d = o_d < DV
    c_v = 2 * HK * DK + i_h * DV
    o_v = c_v + o_d
    if CONVOLVE:
        p_w = window + c_v * (W - 1)
        b_v = _convolve(
            p_v, stride_vt, p_w, weight, bias, parents, p_rows, o_n, m_n, o_d, o_v, m_d
        )
    else:
        m = m_n[:, None] & m_d[None, :]
        p_v = p_v + o_n.to(tl.int64)[:, None] * stride_vt + o_d[None, :]
        b_v = tl.load(p_v, mask=m, other=0.0)
        tl.store(p_rows + (o_n + (W - 1))[:, None] * C + o_v[None, :], b_v, mask=m)
    m_all = (o_n < T)[:, None] & m_d[None, :]
    tl.store(p_qkv + o_n[:, None] * C + o_v[None, :], b_v, mask=m_all)


@triton.jit
def _prepare_gates(
    p_a,
    p_b,
    stride_at,
    stride_ah,
    stride_bt,
    stride_bh,
    A_log,
    dt_bias,
    parents,
    p_gates,
    p_dec,
    o_n,
    m_n,
):
    """All heads: log decays, write gates, and each path's sum of log decays in two floats."""
    o_h = tl.arange(0, 32)
    m_h = o_h < HV
    m = m_n[:, None] & m_h[None, :]
    m_all = (o_n < T)[:, None] & m_h[None, :]
    b_log = tl.load(A_log + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    b_bias = tl.load(dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    p_a = p_a + o_h.to(tl.int64)[None, :] * stride_ah
    p_b = p_b + o_h.to(tl.int64)[None, :] * stride_bh
    o_t = o_n.to(tl.int64)[:, None]
    b_a = tl.load(p_a + o_t * stride_at, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + o_t * stride_bt, mask=m, other=0.0).to(tl.float32)
    b_g = tl.where(m, _log_decay(b_a, b_log, b_bias), 0.0)
    b_beta = tl.where(m, _write_gate(b_b), 0.0)
    p_gates = p_gates + o_n[:, None] * (2 * HV) + o_h[None, :]
    tl.store(p_gates, b_g, mask=m_all)
    tl.store(p_gates + HV, b_beta, mask=m_all)
    b_hi = b_g
    b_lo = tl.zeros([8, 32], tl.float32)
    b_at = o_n
    for _ in tl.static_range(DEPTH):
        b_at = tl.where(m_n & (b_at > 0), _parent(parents, b_at), -1)
        m_at = (b_at >= 0)[:, None] & m_h[None, :]
        p_at = p_a + b_at.to(tl.int64)[:, None] * stride_at
        b_a = tl.load(p_at, mask=m_at, other=0.0).to(tl.float32)
        b_up = tl.where(m_at, _log_decay(b_a, b_log, b_bias), 0.0)
        b_hi, b_lo = _add(b_hi, b_lo, b_up)
    p_dec = p_dec + o_h[None, :] * T + o_n[:, None]
    tl.store(p_dec, b_hi, mask=m_all)
    tl.store(p_dec + HV * T, b_lo, mask=m_all)
    tl.store(p_dec + 2 * HV * T, b_beta, mask=m_all)


@triton.jit
def prepare_gdn_chain8_d8(
    q,
    k,
    v,
    a,
    b,
    weight,
    bias,
    A_log,
    dt_bias,
    window,
    slots,
    live,
    parents,
    qkv,
    rows,
    kept,
    gates,
    keys,
    vectors,
    decays,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ab,
    stride_at,
    stride_ah,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_slot,
    CONVOLVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Everything node-wise, once: convolution, norms, gates and path sums of log decays.

    Grid (Hk + Hv + 1, T / 8, B): a key head's q and k, a value head's v, then the gates.
    """
    i_r, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    if CONVOLVE:
        _keep(weight, bias, kept, i_r, i_t, i_b)
    if (slot < 0) & (i_r < HK + HV):
        return
    o_n = i_t * 8 + tl.arange(0, 8)
    m_n = (o_n < T) & (slot >= 0)
    if MASKED:
        m_n = m_n & (tl.load(live + i_b * T + o_n, mask=o_n < T, other=0) != 0)
    else:
        if i_r == HK + HV:
            tl.store(live + i_b * T + o_n, m_n.to(tl.int8), mask=o_n < T)
    p_qkv = qkv + i_b * (T * C)
    p_rows = rows + i_b * ((T + W - 1) * C)
    if CONVOLVE:
        window = window + slot * stride_slot
    if i_r < HK:
        _prepare_keys(
            q + i_b * stride_qb + i_r.to(tl.int64) * stride_qh,
            k + i_b * stride_kb + i_r.to(tl.int64) * stride_kh,
            stride_qt,
            stride_kt,
            window,
            weight,
            bias,
            parents,
            p_rows,
            p_qkv,
            None,
            vectors + i_b * (3 * HK * T),
            i_r,
            o_n,
            m_n,
            CONVOLVE,
        )
    elif i_r < HK + HV:
        i_h = i_r - HK
        _prepare_values(
            v + i_b * stride_vb + i_h.to(tl.int64) * stride_vh,
            stride_vt,
            window,
            weight,
            bias,
            parents,
            p_rows,
            p_qkv,
            i_h,
            o_n,
            m_n,
            CONVOLVE,
        )
    else:
        _prepare_gates(
            a + i_b * stride_ab,
            b + i_b * stride_bb,
            stride_at,
            stride_ah,
            stride_bt,
            stride_bh,
            A_log,
            dt_bias,
            parents,
            gates + i_b * (T * 2 * HV),
            decays + i_b * (3 * HV * T),
            o_n,
            m_n,
        )


@triton.jit
def factor_gdn_chain8_d8(
    qkv,
    slots,
    vectors,
    decays,
    ancestors,
    matrices,
    scales,
    DOT: tl.constexpr,
):
    """-G and C without its diagonal, transposed: matrices [B, Hv, 2, COLUMNS, ROWS] float32.

    scales [B, Hv, 4, ROWS]: beta, beta P / |k|, P scale / |q| and q.k of each position's node.
    Grid (ROWS / 16, Hv, B); a program holds 16 rows of G against every column block.
    """
    i_r, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tl.load(slots + i_b) < 0:
        return
    i_k = i_h // 2
    o_p = i_r * 16 + tl.arange(0, 16)
    o_n = _node(o_p)
    m_n = o_n < T
    o_d = tl.arange(0, 128)
    m_d = o_d < DK
    p_q = qkv + i_b * (T * C) + i_k * DK
    p_k = p_q + HK * DK
    p_row = o_n[None, :] * C + o_d[:, None]
    m_row = m_n[None, :] & m_d[:, None]
    b_q = tl.load(p_q + p_row, mask=m_row, other=0.0)  # [DK, B_R]
    b_k = tl.load(p_k + p_row, mask=m_row, other=0.0)
    p_vec = vectors + (i_b * (3 * HK) + i_k) * T
    p_dec = decays + (i_b * (3 * HV) + i_h) * T
    b_rk = tl.load(p_vec + o_n, mask=m_n, other=0.0)
    b_rq = tl.load(p_vec + HK * T + o_n, mask=m_n, other=0.0)
    b_hi = tl.load(p_dec + o_n, mask=m_n, other=0.0)
    b_lo = tl.load(p_dec + HV * T + o_n, mask=m_n, other=0.0)
    b_beta = tl.load(p_dec + 2 * HV * T + o_n, mask=m_n, other=0.0)
    b_gate = b_beta * b_rk
    b_p = _exp(b_hi, b_lo)
    p_scale = scales + (i_b * HV + i_h) * (4 * ROWS) + o_p
    tl.store(p_scale, b_beta)
    tl.store(p_scale + ROWS, b_p * b_gate)
    tl.store(p_scale + 2 * ROWS, b_p * b_rq)
    tl.store(p_scale + 3 * ROWS, tl.load(p_vec + 2 * HK * T + o_n, mask=m_n, other=0.0))
    b_first = _first(o_n)
    p_mat = matrices + (i_b * HV + i_h) * (2 * COLUMNS * ROWS) + o_p[None, :]

    # columns 0 to 15: nodes 0 to 8, with descendants
    if 16 * (i_r + 1) > 0:
        o_c = tl.arange(0, 16)
        o_m = o_c
        m_c = o_m < 9
        p_col = o_m[:, None] * C + o_d[None, :]
        m_col = m_c[:, None] & m_d[None, :]
        b_c = tl.load(p_k + p_col, mask=m_col, other=0.0)  # [columns, DK]
        b_kk = tl.dot(b_c, b_k)  # [columns, B_R]
        b_qk = tl.dot(b_c, b_q)
        o_first, o_last = _first(o_m)[:, None], _last(o_m)[:, None]
        m_anc = (o_first < b_first[None, :]) & (b_first[None, :] <= o_last)
        m_anc = m_anc & m_c[:, None] & m_n[None, :]
        b_chi = tl.load(p_dec + o_m, mask=m_c, other=0.0)
        b_clo = tl.load(p_dec + HV * T + o_m, mask=m_c, other=0.0)
        b_crk = tl.load(p_vec + o_m, mask=m_c, other=0.0)
        b_d = b_hi[None, :] - b_chi[:, None]
        # never positive, but for a dead node below a live one: its own sum is 0
        b_d = tl.where(b_d > 0.0, 0.0, b_d)
        b_d = _exp(b_d, b_lo[None, :] - b_clo[:, None])
        b_d = tl.where(m_anc, b_d, 0.0) * b_crk[:, None]
        b_g = -(b_kk * b_d) * b_gate[None, :]
        # the block's own rows: the nested polynomial on the identity, for every value tile
        if i_r == 0:
            b_i = tl.where((0 + o_c)[:, None] == o_p[None, :], 1.0, 0.0)
            b_x = b_i
            for _ in range(8):
                b_x = tl.dot(b_x, b_g, acc=b_i, input_precision=DOT)
            b_g = b_x
        p_out = p_mat + (0 + o_c)[:, None] * ROWS
        tl.store(p_out, b_g)
        tl.store(p_out + COLUMNS * ROWS, (b_qk * b_d) * b_rq[None, :])


@triton.jit
def solve_gdn_chain8_d8(
    qkv,
    state,
    slots,
    matrices,
    scales,
    u,
    out,
    stride_slot,
    stride_ob,
    stride_ot,
    stride_oh,
    DOT: tl.constexpr,
):
    """U and O of one value tile: state products, nested polynomial, readout.

    Grid (DV / 64, Hv, B).  X <- R - G X runs on the tile: 8 times.
    """
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_k = i_h // 2
    o_v = i_v * 64 + tl.arange(0, 64)
    m_v = o_v < DV
    p_o = out + i_b * stride_ob + i_h.to(tl.int64) * stride_oh + o_v[:, None]
    slot = tl.load(slots + i_b).to(tl.int64)
    if slot < 0:
        b_zero = tl.zeros([64, 16], tl.float32)
        for i_t in range(1):
            o_n = i_t * 16 + tl.arange(0, 16)
            m_o = m_v[:, None] & (o_n < T)[None, :]
            tl.store(p_o + o_n[None, :] * stride_ot, b_zero.to(tl.bfloat16), mask=m_o)
        return
    p_s = state + slot * stride_slot + i_h * (DV * DK) + o_v[:, None] * DK
    p_kq = qkv + i_b * (T * C) + i_k * DK
    p_v = qkv + i_b * (T * C) + 2 * HK * DK + i_h * DV + o_v[:, None]
    p_scale = scales + (i_b * HV + i_h) * (4 * ROWS)
    p_g = matrices + (i_b * HV + i_h) * (2 * COLUMNS * ROWS)
    p_c = p_g + COLUMNS * ROWS

    # the state against k and q of every node, as one operand with columns k0 q0 k1 q1 ...
    o_c = tl.arange(0, 32)
    o_n = o_c // 2
    m_kq0 = o_n < 9
    o_kq0 = o_n * C + tl.where(o_c % 2 == 0, HK * DK, 0)
    b_a0 = tl.zeros([64, 32], tl.float32)
    for i_d in range(4):
        o_d = i_d * 32 + tl.arange(0, 32)
        m_d = o_d < DK
        b_s = tl.load(p_s + o_d[None, :], mask=m_v[:, None] & m_d[None, :], other=0.0)
        # q and k are exact in bf16: two terms of the state keep products at float32 grade
        b_s1 = b_s.to(tl.bfloat16)
        b_s2 = (b_s - b_s1.to(tl.float32)).to(tl.bfloat16)
        p_b = p_kq + o_kq0[None, :] + o_d[:, None]
        b_kq = tl.load(p_b, mask=m_kq0[None, :] & m_d[:, None], other=0.0)
        b_a0 = tl.dot(b_s2, b_kq, acc=b_a0)
        b_a0 = tl.dot(b_s1, b_kq, acc=b_a0)

    # nodes 0 to 8, with descendants
    o_p = 0 + tl.arange(0, 16)
    o_n = tl.arange(0, 16)
    m_n = o_n < 9
    b_ks, b_qs = tl.split(tl.reshape(b_a0, [64, 16, 2]))  # [B_V, nodes]
    b_beta = tl.load(p_scale + o_p)
    b_gate = tl.load(p_scale + ROWS + o_p)
    b_read = tl.load(p_scale + 2 * ROWS + o_p)
    b_self = tl.load(p_scale + 3 * ROWS + o_p)
    m_o = m_v[:, None] & m_n[None, :]
    b_v = tl.load(p_v + o_n[None, :] * C, mask=m_o, other=0.0).to(tl.float32)
    b_u0 = b_beta[None, :] * b_v - b_gate[None, :] * b_ks
    b_o = b_read[None, :] * b_qs
    p_m = (0 + tl.arange(0, 16))[:, None] * ROWS + o_p[None, :]
    b_g = tl.load(p_g + p_m)  # (I + G)^-1 of this block, transposed
    b_u0 = tl.dot(b_u0, b_g, input_precision=DOT)
    b_o = tl.dot(b_u0, tl.load(p_c + p_m), acc=b_o, input_precision=DOT)
    b_o += b_self[None, :] * b_u0
    m_all = m_v[:, None] & (o_n < 9)[None, :]
    tl.store(p_o + o_n[None, :] * stride_ot, b_o.to(tl.bfloat16), mask=m_all)


@triton.jit
def _path(parents, last):
    """Nodes from the root to `last` in order, -1 behind, and how many there are."""
    o_l = tl.arange(0, 16)
    n = (last >= 0).to(tl.int32)
    b_at = last
    for _ in range(DEPTH):
        b_at = tl.where(b_at > 0, _parent(parents, b_at), -1)
        n += (b_at >= 0).to(tl.int32)
    b_path = tl.full([16], -1, tl.int32)
    b_at = last
    for i in range(0, n):
        b_path = tl.where(o_l == n - 1 - i, b_at, b_path)
        b_at = tl.where(b_at > 0, _parent(parents, b_at), -1)
    return b_path, n


@triton.jit
def _at(b_path, i):
    """Entry i of a path, -1 outside."""
    return tl.max(tl.where(tl.arange(0, 16) == i, b_path, -1), 0)


@triton.jit
def _accepted(nodes, live, i_b):
    """The node that row i_b accepted, -1 for none: a dead node or one out of range is none."""
    node = tl.load(nodes + i_b).to(tl.int64)
    m = (node >= 0) & (node < T)
    node = tl.where(m, node, 0).to(tl.int32)
    m = m & (tl.load(live + i_b * T + node) != 0)
    return tl.where(m, node, -1)


@triton.jit
def _replayed(b_y, p_kept, o_c, m_c, b_x, b_x1, b_x2, b_x3):
    """One row of the convolution, term by term as prepare computed it, and rounded alike."""
    b_w = tl.load(p_kept + o_c * (W + 1) + 0, mask=m_c, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x3, b_w, b_y)
    b_w = tl.load(p_kept + o_c * (W + 1) + 1, mask=m_c, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x2, b_w, b_y)
    b_w = tl.load(p_kept + o_c * (W + 1) + 2, mask=m_c, other=0.0).to(tl.float32)
    b_y = tl.fma(b_x1, b_w, b_y)
    b_w = tl.load(p_kept + o_c * (W + 1) + 3, mask=m_c, other=0.0).to(tl.float32)
    return _silu(tl.fma(b_x, b_w, b_y)).to(tl.float32)


@triton.jit
def _commit_state(
    p_s,
    b_s,
    m_s,
    p_track,
    track,
    p_rows,
    p_kept,
    p_gates,
    b_path,
    n,
    c_k,
    c_v,
    o_v,
    m_v,
    CONVOLVED: tl.constexpr,
):
    """Run the recurrence along the accepted path from kept rows; store at `track` and the end."""
    o_d = tl.arange(0, 128)
    m_d = o_d < DK
    o_k = c_k + o_d
    o_v = c_v + o_v
    b_bk = tl.zeros([128], tl.float32)
    b_bv = tl.zeros([64], tl.float32)
    b_k1 = b_bk
    b_v1 = b_bv
    b_k2 = b_bk
    b_v2 = b_bv
    b_k3 = b_bk
    b_v3 = b_bv
    if not CONVOLVED:
        b_bk += tl.load(p_kept + o_k * (W + 1) + W, mask=m_d, other=0.0).to(tl.float32)
        b_bv += tl.load(p_kept + o_v * (W + 1) + W, mask=m_v, other=0.0).to(tl.float32)
        p_old = p_rows + 2 * C
        b_k1 += tl.load(p_old + o_k, mask=m_d, other=0.0).to(tl.float32)
        b_v1 += tl.load(p_old + o_v, mask=m_v, other=0.0).to(tl.float32)
        p_old = p_rows + 1 * C
        b_k2 += tl.load(p_old + o_k, mask=m_d, other=0.0).to(tl.float32)
        b_v2 += tl.load(p_old + o_v, mask=m_v, other=0.0).to(tl.float32)
        p_old = p_rows + 0 * C
        b_k3 += tl.load(p_old + o_k, mask=m_d, other=0.0).to(tl.float32)
        b_v3 += tl.load(p_old + o_v, mask=m_v, other=0.0).to(tl.float32)
    for i in range(0, n):
        node = _at(b_path, i)
        p_row = p_rows + (node + (W - 1)) * C
        b_xk = tl.load(p_row + o_k, mask=m_d, other=0.0).to(tl.float32)
        b_xv = tl.load(p_row + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_k, b_v = b_xk, b_xv
        if not CONVOLVED:
            b_k = _replayed(b_bk, p_kept, o_k, m_d, b_xk, b_k1, b_k2, b_k3)
            b_v = _replayed(b_bv, p_kept, o_v, m_v, b_xv, b_v1, b_v2, b_v3)
            b_k3 = b_k2
            b_v3 = b_v2
            b_k2 = b_k1
            b_v2 = b_v1
            b_k1 = b_xk
            b_v1 = b_xv
        b_k = b_k * (1.0 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6))
        b_beta = tl.load(p_gates + node * (2 * HV) + HV)
        b_s = b_s * _exp(tl.load(p_gates + node * (2 * HV)), 0.0)
        b_u = b_beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
        b_s = b_s + b_u[:, None] * b_k[None, :]
        if node == track:
            tl.store(p_track, b_s.to(tl.float32), mask=m_s)
    tl.store(p_s, b_s.to(tl.float32), mask=m_s)


@triton.jit
def commit_gdn_chain8_d8(
    state,
    window,
    slots,
    nodes,
    track_slots,
    track_nodes,
    rows,
    kept,
    gates,
    keys,
    u,
    live,
    parents,
    capacity,
    stride_sl,
    stride_ss,
    stride_wl,
    stride_ws,
    CONVOLVED: tl.constexpr,
):
    """Write the accepted node's state and window into its slot, and a tracked ancestor's first.

    Grid (Hv * DV / 64 + C / 256, B, layers): state tiles, then channels of the window.
    """
    i_r, i_b, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    last = _accepted(nodes, live, i_b)
    if (slot < 0) | (last < 0):
        return
    b_path, n = _path(parents, last)
    # tracked only where it lies on the accepted path
    track = tl.full([], -1, tl.int32)
    track_slot = slot
    n_track = n * 0
    if track_slots is not None:
        track = _accepted(track_nodes, live, i_b)
        track_slot = tl.load(track_slots + i_b).to(tl.int64)
        o_l = tl.arange(0, 16)
        n_track = tl.max(tl.where((b_path == track) & (o_l < n), o_l + 1, 0), 0)
        m_track = (track_slot >= 0) & (track >= 0) & (n_track > 0)
        n_track = tl.where(m_track, n_track, 0)
        track = tl.where(m_track, track, -1)
        track_slot = tl.where(m_track, track_slot, slot)
    i_row = i_l * capacity + i_b
    p_rows = rows + i_row * ((T + W - 1) * C)
    if i_r < 64:
        i_h = i_r // 2
        i_k = i_h // 2
        o_v = (i_r % 2) * 64 + tl.arange(0, 64)
        m_v = o_v < DV
        o_d = tl.arange(0, 128)
        m_s = m_v[:, None] & (o_d < DK)[None, :]
        p_s = state + i_l * stride_sl + i_h * (DV * DK) + o_v[:, None] * DK + o_d[None, :]
        b_s = tl.load(p_s + slot * stride_ss, mask=m_s, other=0.0).to(tl.float32)
        p_gates = gates + i_row * (T * 2 * HV) + i_h
        p_kept = kept + i_l * (C * (W + 1))
        c_k = (HK + i_k) * DK
        c_v = 2 * HK * DK + i_h * DV
        _commit_state(
            p_s + slot * stride_ss,
            b_s,
            m_s,
            p_s + track_slot * stride_ss,
            track,
            p_rows,
            p_kept,
            p_gates,
            b_path,
            n,
            c_k,
            c_v,
            o_v,
            m_v,
            CONVOLVED,
        )
    else:
        if not CONVOLVED:
            o_c = (i_r - 64) * 256 + tl.arange(0, 256)
            m_c = o_c < C
            p_w = window + i_l * stride_wl + o_c * (W - 1)
            for i_w in tl.static_range(W - 1):
                # history position: a node of the path, or a row of the old window
                i_t = n_track - (W - 1) + i_w
                i_t = tl.where(i_t >= 0, _at(b_path, i_t), i_t)
                b_t = tl.load(p_rows + (i_t + (W - 1)) * C + o_c, mask=m_c & (track >= 0))
                tl.store(p_w + track_slot * stride_ws + i_w, b_t, mask=m_c & (track >= 0))
            for i_w in tl.static_range(W - 1):
                i_t = n - (W - 1) + i_w
                i_t = tl.where(i_t >= 0, _at(b_path, i_t), i_t)
                b_t = tl.load(p_rows + (i_t + (W - 1)) * C + o_c, mask=m_c)
                tl.store(p_w + slot * stride_ws + i_w, b_t, mask=m_c)


@dataclass
class Factors:
    """All memory of a round for up to `batch` rows and `layers` layers; see allocate().

    Until acceptance: rows [L, B, W-1+T, C] (the committed window, then what verify was given),
    kept [L, C, W+1] (convolution weights and bias) and gates [L, B, T, 2, Hv] float32 (log decay,
    write gate), from which commit replays the accepted path.
    live [B, T].

    One layer's scratch: qkv [B, T, C] after the convolution, vectors [B, 3, Hk, T] float32
    (1/|k|, scale/|q|, q.k), decays [B, 3, Hv, T] float32 (log P in two floats, write gate),
    matrices [B, Hv, 2, COLUMNS, ROWS] (-G, C) and scales
    [B, Hv, 4, ROWS] float32.

    Set `check = False` to skip argument checks; those of contents synchronise, and are skipped
    during graph capture as well.
    """

    rows: torch.Tensor
    kept: torch.Tensor | None
    gates: torch.Tensor
    keys: torch.Tensor | None
    u: torch.Tensor | None
    live: torch.Tensor
    parents: torch.Tensor | None
    qkv: torch.Tensor
    vectors: torch.Tensor
    decays: torch.Tensor
    matrices: torch.Tensor
    scales: torch.Tensor
    ancestors: torch.Tensor | None
    check: bool = True
    convolved: bool = False  # rows came from verify_qkv

    @property
    def layers(self) -> int:
        """Layers there is room for."""
        return self.rows.shape[0]

    @property
    def batch(self) -> int:
        """Rows there is room for."""
        return self.rows.shape[1]

    @property
    def round_bytes(self) -> int:
        """Bytes that live until acceptance."""
        kept = (self.rows, self.kept, self.gates, self.keys, self.u, self.live, self.parents)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of one layer's scratch, reused by every layer."""
        scratch = (self.qkv, self.vectors, self.decays, self.matrices, self.scales)
        scratch = (*scratch, self.ancestors)
        return sum(t.numel() * t.element_size() for t in scratch if t is not None)


def allocate(batch: int, layers: int, device: torch.device | str) -> Factors:
    """All memory of a round; verify and commit allocate nothing when `out` is given."""
    if batch < 0 or layers < 1:
        raise ValueError(f"batch, layers: expected at least 0 and 1, got {batch} and {layers}")

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Factors(
        rows=empty(layers, batch, 12, 8192, dtype=MODULE.dtype),
        kept=empty(layers, 8192, 5, dtype=MODULE.dtype),
        gates=empty(layers, batch, 9, 2, 32),
        keys=None,
        u=None,
        live=torch.zeros(batch, 9, dtype=torch.int8, device=device),
        parents=None,
        qkv=empty(batch, 9, 8192, dtype=MODULE.dtype),
        vectors=empty(batch, 3, 16, 9),
        decays=empty(batch, 3, 32, 9),
        matrices=empty(batch, 32, 2, 16, 16),
        scales=empty(batch, 32, 4, 16),
        ancestors=None,
    )


def verify(
    x,
    a,
    b,
    conv_weight,
    A_log,
    dt_bias,
    state,
    conv_state,
    slots,
    factors,
    *,
    layer=0,
    conv_bias=None,
    parents=None,
    live=None,
    out=None,
    schedule=None,
):
    """Score every node of B trees from their slots' states: out [B, T, Hv, dv] in x's dtype.

    x [B, T, C]: pre-convolution rows q|k|v, unit last stride.  a, b [B, T, Hv], any strides.
    conv_weight [C, W], conv_bias [C] or None.  A_log, dt_bias [Hv].  state [slots, Hv, dv, dk] and
    conv_state [slots, C, W-1] (oldest first) are only read.  slots [B], negative = padded row.
    live [B, T] bool, prefix-closed, None = all.  Dead and padded rows give zeros.
    Raises ValueError, before any launch, for a wrong shape, dtype, device or stride.
    """
    if _checks(factors):
        _expect("slots", slots, (None,), _INTEGERS, None)
        shape = (slots.shape[0], None, 8192)
        _expect("x", x, shape, (MODULE.dtype,), None, (None, None, 1))
        _expect("conv_weight", conv_weight, (8192, 4), (MODULE.dtype,), x.device, (4, 1))
        if conv_bias is not None:
            _expect("conv_bias", conv_bias, (8192,), (MODULE.dtype,), x.device, (1,))
        shape = (None, 8192, 3)
        _expect("conv_state", conv_state, shape, (MODULE.dtype,), x.device, (None, 3, 1))
    s_b, s_t = x.stride(0), x.stride(1)
    return _verify(
        (x, s_b, s_t, 128),
        (x[..., 2048:], s_b, s_t, 128),
        (x[..., 4096:], s_b, s_t, 128),
        (a, b, A_log, dt_bias),
        (conv_weight, conv_bias, conv_state, conv_state.stride(0)),
        (state, slots, factors, layer),
        (parents, live, out, schedule),
    )


def verify_qkv(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    slots,
    factors,
    *,
    layer=0,
    parents=None,
    live=None,
    out=None,
    schedule=None,
):
    """verify() for engines with a convolution of their own; commit then takes conv_state=None.

    q, k [B, T, Hk, dk] and v [B, T, Hv, dv] after the convolution, before the norm, unit last
    stride; everything else as in verify().
    """
    if _checks(factors):
        _expect("slots", slots, (None,), _INTEGERS, None)
        shape, unit = (slots.shape[0], None, 16, 128), (None, None, None, 1)
        _expect("q", q, shape, (MODULE.dtype,), None, unit)
        _expect("k", k, q.shape, (MODULE.dtype,), q.device, unit)
        _expect("v", v, (*q.shape[:2], 32, 128), (MODULE.dtype,), q.device, unit)
    return _verify(
        (q, *q.stride()[:3]),
        (k, *k.stride()[:3]),
        (v, *v.stride()[:3]),
        (a, b, A_log, dt_bias),
        (None, None, None, 0),
        (state, slots, factors, layer),
        (parents, live, out, schedule),
    )


def _verify(q, k, v, gate, conv, pool, options):
    """Both verifies: q, k, v are (tensor, batch, node and head stride)."""
    a, b, A_log, dt_bias = gate
    state, slots, f, layer = pool
    _, live, out, _ = options
    batch, n = q[0].shape[:2]
    if f.check:
        _check_verify(q[0], n, gate, conv[2], pool, options)
    f.convolved = conv[0] is None
    if out is None:
        out = q[0].new_empty(batch, n, 32, 128)
    if batch == 0:
        return out
    with _on(q[0]):
        if live is not None:
            s_l = live.stride()
            trace_gdn_chain8_d8[(2, batch)](
                None, live, slots, None, f.live, None, 0, 0, *s_l, HAS_LIVE=True, num_warps=1
            )
        masked = live is not None
        prepare_gdn_chain8_d8[(49, 2, batch)](
            q[0],
            k[0],
            v[0],
            a,
            b,
            conv[0],
            conv[1],
            A_log,
            dt_bias,
            conv[2],
            slots,
            f.live,
            f.parents,
            f.qkv,
            f.rows[layer],
            f.kept[layer],
            f.gates[layer],
            None,
            f.vectors,
            f.decays,
            *q[1:],
            *k[1:],
            *v[1:],
            *a.stride(),
            *b.stride(),
            conv[3],
            CONVOLVE=conv[0] is not None,
            MASKED=masked,
            num_warps=4,
        )
        factor_gdn_chain8_d8[(1, 32, batch)](
            f.qkv,
            slots,
            f.vectors,
            f.decays,
            f.ancestors,
            f.matrices,
            f.scales,
            DOT=DOT,
            num_warps=1,
            num_stages=2,
        )
        solve_gdn_chain8_d8[(2, 32, batch)](
            f.qkv,
            state,
            slots,
            f.matrices,
            f.scales,
            None,
            out,
            state.stride(0),
            *out.stride()[:3],
            DOT=DOT,
            num_warps=4,
            num_stages=2,
            **CAP,
        )
    return out


def commit(
    factors,
    state,
    conv_state,
    slots,
    last_node,
    *,
    parents=None,
    track_slots=None,
    track_node=None,
) -> None:
    """Write each row's accepted state and window into its slot, all layers in one launch.

    state [L, slots, Hv, dv, dk]; conv_state [L, slots, C, W-1], or None after verify_qkv.
    last_node [B] int32 or int64: the last accepted node; -1, a dead node, one out of range and a
    padded row commit nothing.  track_slots, track_node [B]: first write the state and window at
    an ancestor of the accepted node (or itself) into another slot; -1 = none.  The topology is
    the one that verify stored, `parents` is only checked.
    Raises ValueError, before any launch, for a wrong shape, dtype, device or stride.
    """
    f = factors
    if _checks(f):
        _check_commit(f, state, conv_state, slots, last_node, parents, track_slots, track_node)
    batch, layers = slots.shape[0], state.shape[0]
    if batch == 0:
        return
    s_w = (0, 0) if conv_state is None else conv_state.stride()[:2]
    with _on(state):
        commit_gdn_chain8_d8[(96, batch, layers)](
            state,
            conv_state,
            slots,
            last_node,
            track_slots,
            track_node,
            f.rows,
            f.kept,
            f.gates,
            f.keys,
            f.u,
            f.live,
            f.parents,
            f.batch,
            *state.stride()[:2],
            *s_w,
            CONVOLVED=conv_state is None,
            num_warps=4,
        )


def _on(tensor):
    """Make the tensor's device the current one: Triton launches on that."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _checks(factors):
    """Whether arguments are checked; that factors came from this module's allocate() always is."""
    if not isinstance(factors, Factors):
        raise ValueError(
            f"factors: expected those of allocate() of {MODULE.name}, got {type(factors).__name__}"
        )
    return factors.check


def _expect(name, tensor, shape, dtypes, device, strides=None):
    """One shape of argument error: what was expected, what came; None = anything."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    want = tuple("any" if s is None else s for s in shape)
    if len(shape) != tensor.dim() or any(
        s is not None and s != t for s, t in zip(shape, tensor.shape, strict=True)
    ):
        raise ValueError(f"{name}: expected shape {want}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        have = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: expected {have}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if strides is not None and any(
        s is not None and n > 1 and s != t
        for s, t, n in zip(strides, tensor.stride(), tensor.shape, strict=True)
    ):
        want = tuple("any" if s is None else s for s in strides)
        raise ValueError(f"{name}: expected strides {want}, got {tensor.stride()}")


_INTEGERS = (torch.int32, torch.int64)


def _check_verify(x, n, gate, conv_state, pool, options):
    """Everything but the rows themselves; contents too, outside of graph capture."""
    a, b, A_log, dt_bias = gate
    state, slots, f, layer = pool
    parents, live, out, schedule = options
    batch, device = x.shape[0], x.device
    rows = "q" if conv_state is None else "x"
    if n != 9:
        raise ValueError(f"{rows}: expected 9 nodes, got {n}")
    if schedule not in (None, *MODULE.schedules):
        raise ValueError(f"schedule: expected one of {MODULE.schedules}, got {schedule!r}")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"{rows}: expected a GPU tensor, or TRITON_INTERPRET=1 from the start, got {device}"
        )
    if batch > f.batch or f.rows.device != device:
        raise ValueError(
            f"factors: expected room for batch {batch} on {device}, "
            f"got batch {f.batch} on {f.rows.device}"
        )
    if layer not in range(f.layers):
        raise ValueError(f"layer: expected 0 to {f.layers - 1}, got {layer!r}")
    wide = (torch.float32, MODULE.dtype)
    for name, tensor in (("a", a), ("b", b)):
        _expect(name, tensor, (batch, n, 32), wide, device)
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        _expect(name, tensor, (32,), wide, device, (1,))
    shape, pitch = (None, 32, 128, 128), (None, 16384, 128, 1)
    _expect("state", state, shape, (MODULE.state_dtype,), device, pitch)
    if conv_state is not None and conv_state.shape[0] != state.shape[0]:
        raise ValueError(
            f"conv_state: expected {state.shape[0]} slots as in state, got {conv_state.shape[0]}"
        )
    _expect("slots", slots, (batch,), _INTEGERS, device, (1,))
    if out is not None:
        shape = (batch, n, 32, 128)
        _expect("out", out, shape, (MODULE.dtype,), device, (None, None, None, 1))
        if n * out.stride(1) >= 1 << 31:
            raise ValueError(f"out: expected a node stride below 2^31 / {n}, got {out.stride(1)}")
    if live is not None:
        _expect("live", live, (batch, n), (torch.bool,), device)
    if parents is not None:
        raise ValueError("parents: expected None, this module's topology is compiled in")
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _check_contents(state, slots, parents, live)


def _check_contents(state, slots, parents, live):
    """Slots in range, parents a tree that is not too deep, live prefix-closed; synchronises."""
    if slots.numel() and int(slots.max()) >= state.shape[0]:
        raise ValueError(f"slots: expected below {state.shape[0]}, got {int(slots.max())}")
    trees = [MODULE.parents] * slots.numel() if live is not None else []
    alive = [[True] * len(tree) for tree in trees] if live is None else live.tolist()
    padded = (slots < 0).tolist()
    for row, (tree, keep) in enumerate(zip(trees, alive, strict=True)):
        if padded[row]:
            continue
        levels = [0]
        for node in range(1, len(tree)):
            parent = tree[node]
            if not keep[node]:
                levels.append(0)
                continue
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents: row {row} node {node}: expected a parent below {node}, got {parent}"
                )
            if not keep[parent]:
                raise ValueError(
                    f"live: row {row} node {node}: expected a live parent, got dead node {parent}"
                )
            levels.append(levels[parent] + 1)
        if max(levels) > MODULE.depth:
            raise ValueError(
                f"parents: row {row}: expected depth {MODULE.depth} or less, got {max(levels)}"
            )


def _check_commit(f, state, conv_state, slots, last_node, parents, track_slots, track_node):
    """Arguments of commit, against the round that verify left in the factors."""
    device = f.rows.device
    shape = (None, None, 32, 128, 128)
    _expect("state", state, shape, (MODULE.state_dtype,), device, (None, None, 16384, 128, 1))
    _expect("slots", slots, (None,), _INTEGERS, device, (1,))
    batch, layers = slots.shape[0], state.shape[0]
    if layers > f.layers:
        raise ValueError(f"state: expected at most {f.layers} layers, got {layers}")
    if batch > f.batch:
        raise ValueError(f"slots: expected at most {f.batch} rows, got {batch}")
    _expect("last_node", last_node, (batch,), _INTEGERS, device, (1,))
    if (conv_state is None) != f.convolved:
        raise ValueError(
            "conv_state: expected None after verify_qkv and a tensor after verify, got "
            f"{'None' if conv_state is None else 'a tensor'}"
        )
    if conv_state is not None:
        shape = (layers, state.shape[1], 8192, 3)
        _expect("conv_state", conv_state, shape, (MODULE.dtype,), device, (None, None, 3, 1))
    if (track_slots is None) != (track_node is None):
        raise ValueError("track_slots, track_node: expected both or neither, got one")
    if track_slots is not None:
        _expect("track_slots", track_slots, (batch,), _INTEGERS, device, (1,))
        _expect("track_node", track_node, (batch,), _INTEGERS, device, (1,))
    if parents is not None:
        _expect("parents", parents, (batch, None), _INTEGERS, device)
    if not (state.is_cuda and torch.cuda.is_current_stream_capturing()):
        for name, tensor in (("slots", slots), ("track_slots", track_slots)):
            if tensor is not None and batch and int(tensor.max()) >= state.shape[1]:
                raise ValueError(
                    f"{name}: expected below {state.shape[1]}, got {int(tensor.max())}"
                )

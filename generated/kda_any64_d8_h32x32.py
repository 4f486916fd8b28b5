"""Tree verifier for kda: any:64, at most 64 nodes, depth 8.

template  any:64
parents   given at run time
depth     8 supported; 8 products with G needed
proof     by support: G^9 = 0 for every tree of depth 8 or less
layer     heads 32:32, dims 128:128, convolution 4, activations bf16, state fp32
mixer     delta term, unit keys, convolution, rows q|k|v
gates     g = -exp(A_log) softplus(a + dt_bias) a key channel; beta = sigmoid(b)
numerics  contract fp32; state in two bf16 terms; Y in bf16x3 and two bf16 terms, as R
factors   replay, 41088 bytes a node (a state snapshot: 2170880)
solver    substitution; blocks of 16, 16, 16, 16; 64 columns of G
digest    df19fde2dea18486
compiler  bolegen 0.1.0; regenerate instead of editing; imports torch and triton only

For one value head with state S before the tree (paper: Bole, eq. 2):
    O = (P o Q) S + C U,  (I + G) U = R,  R = D_beta (V - (P o K) S),  G nilpotent.
Launches: trace, prepare, factor, solve; commit for all layers.
Factor folds (I + G)^-1 into Y = C (I + G)^-1: solve has O = (P o Q) S + Y R.
Node order is the caller's everywhere but in the positions of Y.  Names: i_ index, o_ offsets,
m_ mask, b_ on chip, p_ pointer.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["MODULE", "Factors", "Module", "allocate", "commit", "flush", "verify", "verify_qkv"]


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
    conv: int  # W, 1 where there is no convolution
    a_dims: tuple[int, ...] | None  # axes of a behind [B, T]; None: the mixer has no a
    b_dims: tuple[int, ...] | None
    skip: bool  # verify takes D
    dtype: torch.dtype
    state_dtype: torch.dtype
    contract: str
    readout: str  # Y R in O: split keeps the contract; bf16 rounds Y and R first
    factors: str
    schedules: tuple[str, ...]
    digest: str


MODULE = Module(
    name="kda_any64_d8_h32x32",
    mixer="kda",
    template="any:64",
    parents=None,
    nodes=64,
    depth=8,
    steps=8,
    heads=(32, 32),
    dims=(128, 128),
    conv=4,
    a_dims=(32, 128),
    b_dims=(32,),
    skip=False,
    dtype=torch.bfloat16,
    state_dtype=torch.float32,
    contract="fp32",
    readout="split",
    factors="replay",
    schedules=("tiled", "folded"),
    digest="df19fde2dea18486",
)
# how pairs of float32 are multiplied; AMD has no tf32x3
DOT = "tf32x3" if torch.version.hip is None else "bf16x6"
# the same for Y, which reaches nothing but outputs that are rounded to bf16
FOLD = "bf16x3"
# registers a thread, where the backend knows such a cap: of solve, and where it commits first
FACTOR_CAP = {"maxnreg": 128} if torch.version.hip is None else {}
CAP = {"maxnreg": 168} if torch.version.hip is None else {}
FOLDED_CAP = {"maxnreg": 168} if torch.version.hip is None else {}

T = tl.constexpr(64)  # nodes
DEPTH = tl.constexpr(8)  # most edges from a node to the root
HK = tl.constexpr(32)
HV = tl.constexpr(32)
DK = tl.constexpr(128)
DV = tl.constexpr(128)
W = tl.constexpr(4)
C = tl.constexpr(12288)  # channels of a row q|k|v
ROWS = tl.constexpr(64)  # padded positions of all blocks
COLUMNS = tl.constexpr(64)  # of them, columns of G: all


@triton.jit
def _exp(hi, lo):
    """e^(hi + lo); the product with log2 e is kept in two floats, so large |hi| loses nothing."""
    hi = tl.where(hi < -1000.0, -1000.0, hi)  # e^-1000 is 0 already; keeps infinities out
    b_t = hi * 1.4426950216293335
    b_e = tl.fma(hi, 1.4426950216293335, -b_t) + (hi * 1.925963033500e-8 + lo * 1.4426950216293335)
    return tl.exp2(b_t) * (1.0 + b_e * 0.6931471805599453)


@triton.jit
def _add(hi, lo, b_x):
    """(hi, lo) + b_x in two floats."""
    b_s = hi + b_x
    b_b = b_s - hi
    return b_s, lo + ((hi - (b_s - b_b)) + (b_x - b_b))


@triton.jit
def _softplus(b_x):
    """log(1 + e^x), to the last digits however small it is."""
    b_e = _exp(-tl.abs(b_x), 0.0)
    b_s = b_e / (2.0 + b_e)
    b_z = b_s * b_s
    b_z = 1.0 + b_z * (1 / 3 + b_z * (1 / 5 + b_z * (1 / 7 + b_z * (1 / 9 + b_z * (1 / 11)))))
    return tl.where(b_x > 0.0, b_x, 0.0) + 2.0 * b_s * b_z


@triton.jit
def _step(b_a, b_bias):
    """a + dt_bias; infinities are legal, but inf - inf and 0 * inf would come of them."""
    b_x = b_a + b_bias
    return tl.where(b_x > 1e30, 1e30, tl.where(b_x < -1e30, -1e30, b_x))


@triton.jit
def _sigmoid(b_x):
    """1 / (1 + e^-x)."""
    b_e = _exp(-tl.abs(b_x), 0.0)
    return tl.where(b_x >= 0.0, 1.0, b_e) / (1.0 + b_e)


@triton.jit
def _log_decay(b_x, b_log):
    """g = -exp(A_log) softplus(a + dt_bias), natural logarithm, at least -1000 (a decay of 0)."""
    b_log = tl.where(b_log > 1000.0, 1000.0, tl.where(b_log < -1000.0, -1000.0, b_log))
    b_g = -_exp(b_log, 0.0) * _softplus(b_x)
    # far below zero softplus(x) is e^x, which may underflow: up to e^60 times that, a decay of 1
    if b_log > 60.0:
        hi, lo = _add(b_log, 0.0, b_x)
        b_g = tl.where(b_x < -20.0, -_exp(hi, lo), b_g)
    return tl.where(b_g < -1000.0, -1000.0, b_g)


@triton.jit
def _silu(b_x):
    """x sigmoid(x), float32."""
    # a root and two products cost less than a division
    b_r = tl.rsqrt(1.0 + tl.exp2(b_x * -1.4426950408889634))
    return b_x * b_r * b_r


@triton.jit
def _coarse(b_x):
    """The nearest bf16, still in float32: whole-number steps cost less than converting twice."""
    b_i = b_x.to(tl.int32, bitcast=True) + 0x8000
    return (b_i & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _parent(parents, i):
    """Parent of node i > 0 in this row's topology, -1 for a dead node."""
    return tl.load(parents + i, mask=(i > 0) & (i < T), other=-1)


@triton.jit
def _sees(ancestors, o_n, o_m, i_m, m):
    """[N, M]: where m, is node j of o_m = i_m, i_m + 1 ... a strict ancestor of node i of o_n?"""
    b_bits = tl.zeros([o_n.shape[0], o_m.shape[0]], tl.int32)
    for i_w in tl.static_range((o_m.shape[0] + 31) // 32):
        word = i_m // 32 + i_w
        b_w = tl.load(ancestors + word * T + o_n, mask=(o_n < T) & (word < 2), other=0)
        b_bits = tl.where((o_m // 32 == word)[None, :], b_w[:, None], b_bits)
    return m & (((b_bits >> (o_m & 31)[None, :]) & 1) != 0)


@triton.jit
def _above(parents, i):
    """The position before i on its path: below the root it runs on into the window."""
    return tl.where(i > 0, _parent(parents, i), i - 1)


@triton.jit
def trace_kda_any64_d8_h32x32(
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
    nodes,
    HAS_LIVE: tl.constexpr,
):
    """Which nodes are live: linked to the root by live nodes, in at most DEPTH edges.

    Writes live [B, T] int8, parents [B, T] and ancestors [B, T/32, T] int32: bit j of node i.
    """
    i_t, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n = i_t * 8 + tl.arange(0, 8)
    m_live = (o_n < nodes) & (tl.load(slots + i_b) >= 0)
    if HAS_LIVE:
        p_live = given_live + i_b * stride_lb
        m_live = m_live & (tl.load(p_live + o_n * stride_lt, mask=m_live, other=0) != 0)
    p_parents = given_parents + i_b * stride_pb
    o_w = tl.arange(0, 2)
    b_bits = tl.zeros([8, 2], tl.int32)
    b_first = tl.load(p_parents + o_n * stride_pt, mask=m_live & (o_n > 0), other=-1)
    b_at = o_n
    for _ in range(DEPTH):
        m_up = m_live & (b_at > 0)
        b_up = tl.load(p_parents + b_at * stride_pt, mask=m_up, other=0)
        # parents come before children: whatever else stands there is garbage, not a link
        m_ok = (b_up >= 0) & (b_up < b_at)
        m_live = m_live & (m_ok | (b_at <= 0))
        b_up = tl.where(m_up & m_ok, b_up, 0).to(tl.int32)
        m_word = (m_up & m_ok)[:, None] & ((b_up >> 5)[:, None] == o_w[None, :])
        b_bits = tl.where(m_word, b_bits | (1 << (b_up & 31))[:, None], b_bits)
        if HAS_LIVE:
            m_live = m_live & (tl.load(p_live + b_up * stride_lt, mask=m_up, other=1) != 0)
        b_at = b_up
    m_live = m_live & (b_at <= 0)
    tl.store(live + i_b * T + o_n, m_live.to(tl.int8), mask=o_n < T)
    b_first = tl.where(m_live & (o_n > 0), b_first, -1).to(tl.int32)
    tl.store(parents + i_b * T + o_n, b_first, mask=o_n < T)
    p_bits = ancestors + i_b * (2 * T) + o_w[None, :] * T + o_n[:, None]
    b_bits = tl.where(m_live[:, None], b_bits, 0)
    tl.store(p_bits, b_bits, mask=(o_n < T)[:, None] & (o_w < 2)[None, :])


@triton.jit
def _taps(weight, bias, o_c, m_c):
    """Bias and weights of channels o_c, oldest tap first, float32."""
    o_w = tl.arange(0, 4)
    m_w = m_c[:, None] & (o_w < W)[None, :]
    b_w = tl.load(weight + o_c[:, None] * W + o_w[None, :], mask=m_w, other=0.0).to(tl.float32)
    b_bias = tl.zeros(o_c.shape, tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_w0 = tl.sum(tl.where(o_w[None, :] == 0, b_w, 0.0), 1)
    b_w1 = tl.sum(tl.where(o_w[None, :] == 1, b_w, 0.0), 1)
    b_w2 = tl.sum(tl.where(o_w[None, :] == 2, b_w, 0.0), 1)
    b_w3 = tl.sum(tl.where(o_w[None, :] == 3, b_w, 0.0), 1)
    return b_bias, b_w0, b_w1, b_w2, b_w3


@triton.jit
def _given(p_x, stride_x, p_live, nodes, i_n, o_d, m_d, MASKED: tl.constexpr):
    """Rows from node i_n on, before `nodes`, as given; their places; which are live."""
    o_n = i_n + tl.arange(0, 64)
    m = (_live(p_live, o_n, MASKED) & (o_n < nodes))[:, None] & m_d[None, :]
    p_x = p_x + o_n.to(tl.int64)[:, None] * stride_x + o_d[None, :]
    return tl.load(p_x, mask=m, other=0.0), o_n[:, None] * C + o_d[None, :], m


@triton.jit
def _kept_at(p_rows, p_above, o_n):
    """Where row o_n is kept: a node's, or above the root the committed window's."""
    return tl.multiple_of(tl.where(o_n < 0, p_above, p_rows) + o_n * (C // 2), 16)


@triton.jit
def _widen(b_x):
    """Two bf16 in a word -> both in float32; an instruction each, where a conversion takes two."""
    return (b_x << 16).to(tl.float32, bitcast=True), (b_x & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(b_y):
    """The nearest bf16, ties to even, still in float32."""
    b_i = b_y.to(tl.int32, bitcast=True)
    return ((b_i + 0x7FFF + ((b_i >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _pairs_of(b_x):
    """Elements 2 i and 2 i + 1."""
    return tl.split(tl.reshape(b_x, [b_x.shape[0] // 2, 2]))


@triton.jit
def _convolve_pairs(p_rows, p_above, parents, o_n, m, o_w, taps, MASKED: tl.constexpr):
    """Tree convolution of one head's channels 2 o_w and 2 o_w + 1 at nodes o_n: a node and its
    W - 1 ancestors, then SiLU, before the rounding: two [N, D / 2].
    """
    p_rows = p_rows.to(tl.pointer_type(tl.int32))
    p_above = p_above.to(tl.pointer_type(tl.int32))
    o_1 = _above(parents, o_n)
    o_2 = _above(parents, o_1)
    o_3 = _above(parents, o_2)
    p_3 = _kept_at(p_rows, p_above, o_3)
    b_x3 = tl.load(p_3[:, None] + o_w[None, :], mask=m, other=0)
    p_2 = _kept_at(p_rows, p_above, o_2)
    b_x2 = tl.load(p_2[:, None] + o_w[None, :], mask=m, other=0)
    p_1 = _kept_at(p_rows, p_above, o_1)
    b_x1 = tl.load(p_1[:, None] + o_w[None, :], mask=m, other=0)
    b_x0 = tl.load(p_rows + o_n[:, None] * (C // 2) + o_w[None, :], mask=m, other=0)
    b_u0, b_u1 = _pairs_of(taps[0])
    b_y0 = tl.zeros([o_n.shape[0], o_w.shape[0]], tl.float32) + b_u0[None, :]
    b_y1 = tl.zeros([o_n.shape[0], o_w.shape[0]], tl.float32) + b_u1[None, :]
    b_0, b_1 = _widen(b_x3)
    b_u0, b_u1 = _pairs_of(taps[1])
    b_y0 = tl.fma(b_0, b_u0[None, :], b_y0)
    b_y1 = tl.fma(b_1, b_u1[None, :], b_y1)
    b_0, b_1 = _widen(b_x2)
    b_u0, b_u1 = _pairs_of(taps[2])
    b_y0 = tl.fma(b_0, b_u0[None, :], b_y0)
    b_y1 = tl.fma(b_1, b_u1[None, :], b_y1)
    b_0, b_1 = _widen(b_x1)
    b_u0, b_u1 = _pairs_of(taps[3])
    b_y0 = tl.fma(b_0, b_u0[None, :], b_y0)
    b_y1 = tl.fma(b_1, b_u1[None, :], b_y1)
    b_0, b_1 = _widen(b_x0)
    b_u0, b_u1 = _pairs_of(taps[4])
    b_y0 = tl.fma(b_0, b_u0[None, :], b_y0)
    b_y1 = tl.fma(b_1, b_u1[None, :], b_y1)
    b_y0, b_y1 = _silu(b_y0), _silu(b_y1)
    if MASKED:
        b_y0, b_y1 = tl.where(m, b_y0, 0.0), tl.where(m, b_y1, 0.0)
    return b_y0, b_y1


@triton.jit
def _keep_taps(weight, bias, kept, i_r):
    """Convolution weights and bias of 128 channels, for commit to replay with."""
    o_c = i_r * 128 + tl.arange(0, 128)
    m_c = o_c < C
    b_bias = tl.zeros([128], tl.bfloat16)
    if bias is not None:
        b_bias = tl.load(bias + o_c, mask=m_c, other=0.0)
    b_w0 = tl.load(weight + o_c * W + 0, mask=m_c, other=0.0)
    b_w1 = tl.load(weight + o_c * W + 1, mask=m_c, other=0.0)
    b_w2 = tl.load(weight + o_c * W + 2, mask=m_c, other=0.0)
    b_w3 = tl.load(weight + o_c * W + 3, mask=m_c, other=0.0)
    tl.store(kept + o_c, b_w0, mask=m_c)
    tl.store(kept + 1 * C + o_c, b_w1, mask=m_c)
    tl.store(kept + 2 * C + o_c, b_w2, mask=m_c)
    tl.store(kept + 3 * C + o_c, b_w3, mask=m_c)
    tl.store(kept + W * C + o_c, b_bias, mask=m_c)


@triton.jit
def _live(p_live, o_n, MASKED: tl.constexpr):
    """Which of the nodes o_n are live."""
    m_n = o_n < T
    if MASKED:
        m_n = m_n & (tl.load(p_live + o_n, mask=m_n, other=0) != 0)
    return m_n


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
    """All heads' write gates."""
    o_h = tl.arange(0, 32)
    m_h = o_h < HV
    m = m_n[:, None] & m_h[None, :]
    m_all = (o_n < T)[:, None] & m_h[None, :]
    p_b = p_b + o_h.to(tl.int64)[None, :] * stride_bh
    o_t = o_n.to(tl.int64)[:, None]
    b_b = tl.load(p_b + o_t * stride_bt, mask=m, other=0.0).to(tl.float32)
    b_beta = tl.where(m, _sigmoid(b_b), 0.0)
    p_gates = p_gates + o_n[:, None] * (HV) + o_h[None, :]
    tl.store(p_gates, b_beta, mask=m_all)
    p_dec = p_dec + o_h[None, :] * T + o_n[:, None]
    tl.store(p_dec, b_beta, mask=m_all)


@triton.jit
def _prepare_channels(
    p_a, stride_at, A_log, dt_bias, p_live, p_rates, o_n, i_h, MASKED: tl.constexpr
):
    """Decays of a value head's key channels at nodes o_n."""
    o_d = tl.arange(0, 128)
    m_d = o_d < DK
    m = _live(p_live, o_n, MASKED)[:, None] & m_d[None, :]
    b_log = tl.load(A_log + i_h).to(tl.float32)
    b_bias = tl.load(dt_bias + i_h * DK + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    p_n = p_a + o_n.to(tl.int64)[:, None] * stride_at + o_d[None, :]
    b_x = _step(tl.load(p_n, mask=m, other=0.0).to(tl.float32), b_bias)
    b_decay = tl.where(m, _exp(_log_decay(b_x, b_log), 0.0), 1.0)
    m_all = (o_n < T)[:, None] & m_d[None, :]
    tl.store(p_rates + o_n[:, None] * (HV * DK) + o_d[None, :], b_decay, mask=m_all)


@triton.jit
def _prepare_rows(
    p_x,
    stride_xt,
    slot,
    window,
    stride_slot,
    last,
    p_pending,
    pending_parents,
    weight,
    bias,
    parents,
    p_live,
    p_rows,
    p_above,
    p_before,
    p_qkv,
    p_vec,
    p_keys,
    c,
    i_t,
    D: tl.constexpr,
    D_P: tl.constexpr,
    IS_KEY: tl.constexpr,
    CONVOLVE: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
):
    """One head's rows of q, k or v, D channels from c on; the inverse norms of q's and of k's."""
    o_d = tl.arange(0, D_P)
    m_d = o_d < D
    p_rows, p_above = p_rows + c, p_above + c
    if CONVOLVE:
        # all that does not wait for the slot is asked for before it is looked at
        nodes = tl.minimum((i_t + 1) * TILES * 8, T)
        b_given, o_x, m_x = _given(p_x, stride_xt, p_live, nodes, 0, o_d, m_d, MASKED)
        o_w = tl.arange(0, D_P // 2)
        m_w = o_w < D // 2
        taps = _taps(weight, bias, c + o_d, m_d)
    if slot < 0:
        return
    if CONVOLVE:
        # the committed window lies before the root, so that a path runs on into it
        p_w = window + slot * stride_slot + (c + o_d) * (W - 1)
        b_c0 = tl.load(p_w, mask=m_d & (last < 0), other=0.0)
        b_c1 = tl.load(p_w + 1, mask=m_d & (last < 0), other=0.0)
        b_c2 = tl.load(p_w + 2, mask=m_d & (last < 0), other=0.0)
        if p_pending is not None:
            # not there yet: the last rows of the path that solve commits, or of the old one
            p_n = p_pending + c + o_d
            b_c2 = tl.load(p_w + (W - 1) + last, mask=m_d & (last < 0), other=0.0)
            b_c2 = tl.load(p_n + last * C, mask=m_d & (last >= 0), other=b_c2)
            last = _above(pending_parents, last)
            b_c1 = tl.load(p_w + (W - 1) + last, mask=m_d & (last < 0), other=0.0)
            b_c1 = tl.load(p_n + last * C, mask=m_d & (last >= 0), other=b_c1)
            last = _above(pending_parents, last)
            b_c0 = tl.load(p_w + (W - 1) + last, mask=m_d & (last < 0), other=0.0)
            b_c0 = tl.load(p_n + last * C, mask=m_d & (last >= 0), other=b_c0)
        tl.store(p_rows + o_x, b_given, mask=m_x)
        tl.store(p_above - 3 * C + o_d, b_c0, mask=m_d)
        tl.store(p_above - 2 * C + o_d, b_c1, mask=m_d)
        tl.store(p_above - 1 * C + o_d, b_c2, mask=m_d)
        if IS_KEY and c >= HK * DK:
            p_k = p_before + (c - HK * DK) + o_d
            tl.store(p_k, b_c0, mask=m_d)
            tl.store(p_k + 1 * (HK * DK), b_c1, mask=m_d)
            tl.store(p_k + 2 * (HK * DK), b_c2, mask=m_d)
        # rows are read back from where they are kept
        tl.debug_barrier()
    for i_n in range(i_t * TILES, (i_t + 1) * TILES):
        o_n = i_n * 8 + tl.arange(0, 8)
        m_n = _live(p_live, o_n, MASKED)[:, None]
        m = m_n & m_d[None, :]
        m_all = (o_n < T)[:, None] & m_d[None, :]
        p_out = p_qkv + c + o_n[:, None] * C + o_d[None, :]
        if CONVOLVE:
            m_y = m_n & m_w[None, :]
            b_y0, b_y1 = _convolve_pairs(p_rows, p_above, parents, o_n, m_y, o_w, taps, MASKED)
            b_y = tl.join(b_y0, b_y1).to(tl.bfloat16)
            tl.store(p_out, tl.reshape(b_y, [8, D_P]), mask=m_all)
            if IS_KEY:
                b_y0, b_y1 = _rounded(b_y0), _rounded(b_y1)
                b_sum = tl.sum(b_y0 * b_y0 + b_y1 * b_y1, 1)
        else:
            p_n = p_x + o_n.to(tl.int64)[:, None] * stride_xt + o_d[None, :]
            b_x = tl.load(p_n, mask=m, other=0.0)
            tl.store(p_out, b_x, mask=m_all)
            b_x = b_x.to(tl.float32)
            b_sum = tl.sum(b_x * b_x, 1)
        if IS_KEY:
            b_r = 1.0 / tl.sqrt(b_sum + 1e-6)
            scale = tl.where(c < HK * DK, 0.08838834764831845, 1.0)
            tl.store(p_vec + o_n, b_r * scale, mask=o_n < T)


@triton.jit
def prepare_kda_any64_d8_h32x32(
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
    pending_nodes,
    pending_live,
    pending_parents,
    pending_rows,
    qkv,
    rows,
    window_rows,
    window_keys,
    kept,
    gates,
    rates,
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
    TILES: tl.constexpr,
):
    """Everything node-wise, once: convolution, norms, gates and decays of channels.

    Grid (T / 8 + Hv T / 16 + (2 Hk + Hv) T / (8 TILES), B): gates of a few nodes, then a
    value head's channels at a few nodes, then a head's rows.
    """
    i_p, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    p_live = live + i_b * T
    parents = parents + i_b * T
    if i_p < 8:
        o_n = i_p * 8 + tl.arange(0, 8)
        m_n = _live(p_live, o_n, MASKED) & (slot >= 0)
        if not MASKED:
            tl.store(p_live + o_n, m_n.to(tl.int8), mask=o_n < T)
        _prepare_gates(
            None,
            b + i_b * stride_bb,
            stride_at,
            stride_ah,
            stride_bt,
            stride_bh,
            A_log,
            dt_bias,
            parents,
            gates + i_b * (T * HV),
            decays + i_b * (HV * T),
            o_n,
            m_n,
        )
        return
    if i_p < 136:
        if slot >= 0:
            i_h = (i_p - 8) % HV
            o_n = (i_p - 8) // HV * 16 + tl.arange(0, 16)
            _prepare_channels(
                a + i_b * stride_ab + i_h.to(tl.int64) * stride_ah,
                stride_at,
                A_log,
                dt_bias,
                p_live,
                rates + i_b * (T * HV * DK) + i_h * DK,
                o_n,
                i_h,
                MASKED,
            )
        return
    i_t = (i_p - 136) // (2 * HK + HV)
    i_r = (i_p - 136) % (2 * HK + HV)
    p_qkv = qkv + i_b * (T * C)
    p_rows = rows + i_b * (T * C)
    p_above = window_rows + (i_b + 1) * ((W - 1) * C)
    last = -1
    p_pending = None
    if pending_nodes is not None:
        last = _accepted(pending_nodes, pending_live, i_b)
        p_pending = pending_rows + i_b * (T * C)
        pending_parents = pending_parents + i_b * T
    if i_r < 2 * HK:
        i_k = (i_r % HK).to(tl.int64)
        p_x = q + i_b * stride_qb + i_k * stride_qh
        stride_xt = stride_qt
        if i_r >= HK:
            p_x = k + i_b * stride_kb + i_k * stride_kh
            stride_xt = stride_kt
        _prepare_rows(
            p_x,
            stride_xt,
            slot,
            window,
            stride_slot,
            last,
            p_pending,
            pending_parents,
            weight,
            bias,
            parents,
            p_live,
            p_rows,
            p_above,
            window_keys + i_b * ((W - 1) * HK * DK),
            p_qkv,
            vectors + (i_b * (2 * HK) + i_r) * T,
            None,
            i_r * DK,
            i_t,
            DK,
            128,
            True,
            CONVOLVE,
            MASKED,
            TILES,
        )
    else:
        i_h = i_r - 2 * HK
        _prepare_rows(
            v + i_b * stride_vb + i_h.to(tl.int64) * stride_vh,
            stride_vt,
            slot,
            window,
            stride_slot,
            last,
            p_pending,
            pending_parents,
            weight,
            bias,
            parents,
            p_live,
            p_rows,
            p_above,
            None,
            p_qkv,
            None,
            None,
            i_h * DV + 2 * HK * DK,
            i_t,
            DV,
            128,
            False,
            CONVOLVE,
            MASKED,
            TILES,
        )
    if CONVOLVE and (i_t == 0) & (i_b == 0):
        _keep_taps(weight, bias, kept, i_r)


@triton.jit
def _lift(parents, b_at):
    """Nodes above those of b_at, -1 above a root: read, since every chunk of channels asks."""
    return tl.load(parents + b_at, mask=b_at > 0, other=-1)


@triton.jit
def _rise(b_q, b_k, p_rates, p_k, b_at, b_up, parents, o_d, m_d):
    """Rows q_i and k_i one node further up, from b_at to b_up, and their products with its key."""
    p_at = p_rates + b_at[:, None] * (HV * DK) + o_d[None, :]
    b_decay = tl.load(p_at, mask=(b_at > 0)[:, None] & m_d, other=1.0)
    b_q, b_k = b_q * b_decay, b_k * b_decay
    m_up = b_up >= 0
    p_up = p_k + b_up[:, None] * C + o_d[None, :]
    b_m = tl.load(p_up, mask=m_up[:, None] & m_d, other=0.0).to(tl.float32)
    return b_q, b_k, tl.sum(b_k * b_m, 1), tl.sum(b_q * b_m, 1)


@triton.jit
def _store_reach(p_out, b_x, m):
    """Rows as they reach the state, in two bf16 terms."""
    b_h = _coarse(b_x)
    tl.store(p_out, b_h.to(tl.bfloat16), mask=m)
    tl.store(p_out + 2 * T * DK, (b_x - b_h).to(tl.bfloat16), mask=m)


@triton.jit
def _gram(p_q, p_k, o_n, m_n, o_m, m_m, DOT: tl.constexpr, p_rates, p_reach, parents):
    """k_i.k_j and q_i.k_j of nodes i of o_n with their ancestors j in o_m, every channel decayed
    on the way from j to i, and q_i.k_i: two [N, M].  Rows k_i and q_i decay a node at a time on
    their way up, and what reaches the state is stored.
    """
    b_n = tl.where(m_n, o_n, -1)
    b_to = tl.where(m_m, o_m, -2)[None, :]
    o_s = tl.arange(0, 8)[None, :]  # steps up
    b_kk = tl.zeros([o_n.shape[0], 8], tl.float32)
    b_qk = b_kk
    b_own = tl.zeros(o_n.shape, tl.float32)
    for i_d in range(4):
        o_d = i_d * 32 + tl.arange(0, 32)
        m_d = (o_d < DK)[None, :]
        p_n = o_n[:, None] * C + o_d[None, :]
        b_q = tl.load(p_q + p_n, mask=m_n[:, None] & m_d, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + p_n, mask=m_n[:, None] & m_d, other=0.0).to(tl.float32)
        b_own += tl.sum(b_q * b_k, 1)
        b_at = b_n
        for i_s in tl.static_range(DEPTH):
            b_up = _lift(parents, b_at)
            b_q, b_k, b_g, b_c = _rise(b_q, b_k, p_rates, p_k, b_at, b_up, parents, o_d, m_d)
            m_is = o_s == i_s
            b_kk = tl.where(m_is, b_kk + b_g[:, None], b_kk)
            b_qk = tl.where(m_is, b_qk + b_c[:, None], b_qk)
            b_at = b_up
        # the state is above the root
        b_decay = tl.load(p_rates + o_d[None, :], mask=m_d, other=1.0)
        p_n = p_reach + o_n[:, None] * (2 * DK) + o_d[None, :]
        _store_reach(p_n, b_k * b_decay, m_n[:, None] & m_d)
        _store_reach(p_n + DK, b_q * b_decay, m_n[:, None] & m_d)
    # from steps up to the columns of the nodes that they end at
    b_ks, b_qs = b_kk, b_qk
    b_kk = tl.zeros([o_n.shape[0], o_m.shape[0]], tl.float32)
    b_qk = b_kk
    b_at = b_n
    for i_s in range(DEPTH):
        b_at = _lift(parents, b_at)
        m_is = b_at[:, None] == b_to
        b_kk += tl.where(m_is, tl.sum(tl.where(o_s == i_s, b_ks, 0.0), 1)[:, None], 0.0)
        b_qk += tl.where(m_is, tl.sum(tl.where(o_s == i_s, b_qs, 0.0), 1)[:, None], 0.0)
    b_qk = tl.where(b_n[:, None] == b_to, b_own[:, None], b_qk)
    return b_kk, b_qk


@triton.jit
def _scales(p_q, p_k, p_rq, p_rk, p_dec, p_scale):
    """Scales [4, ROWS] of each position's node: beta, beta / |k|, scale / |q| and q.k."""
    for i_r in range(1):
        o_p = i_r * 64 + tl.arange(0, 64)
        o_n = o_p
        m_n = (o_n < T) & (o_p < ROWS)
        b_beta = tl.load(p_dec + o_n, mask=m_n, other=0.0)
        b_rk = tl.load(p_rk + o_n, mask=m_n, other=0.0)
        b_rq = tl.load(p_rq + o_n, mask=m_n, other=0.0)
        tl.store(p_scale + o_p, b_beta, mask=o_p < ROWS)
        tl.store(p_scale + ROWS + o_p, b_beta * b_rk, mask=o_p < ROWS)
        tl.store(p_scale + 2 * ROWS + o_p, b_rq, mask=o_p < ROWS)


@triton.jit
def _pair(b_kk, b_qk, p_rq, p_rk, p_dec, p_scale, ancestors, o_n, m_n, o_m, m_m, i_m, i_p):
    """-G and C [N, M] of nodes i at positions from i_p on, o_n, with their ancestors j in o_m.

    C has its diagonal where i = j is among the columns.
    """
    b_rm = tl.load(p_rk + o_m, mask=m_m, other=0.0)[None, :]
    b_d = b_rm
    b_gate = tl.load(p_rk + o_n, mask=m_n, other=0.0)
    b_gate *= tl.load(p_dec + o_n, mask=m_n, other=0.0)
    b_g = -(b_kk * b_d) * b_gate[:, None]
    b_rq = tl.load(p_rq + o_n, mask=m_n, other=0.0)[:, None]
    b_own = b_d
    b_c = (b_qk * b_own) * b_rq
    return b_g, b_c


@triton.jit
def _halves(b_x):
    """The first and the second half of the columns."""
    b_x = tl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2])
    return tl.split(tl.permute(b_x, [0, 2, 1]))


@triton.jit
def _invert(p_prod, i_m, DOT: tl.constexpr):
    """4 diagonal blocks -G from column i_m on become (I + G)^-1: X <- I - G X, nested."""
    o_s = i_m + tl.arange(0, 4)[:, None, None] * 16
    o_i = tl.arange(0, 16)[None, :, None]
    o_j = tl.arange(0, 16)[None, None, :]
    p_g = p_prod + (o_s + o_i) * COLUMNS + o_s + o_j
    m = (o_s < COLUMNS) & (o_i < 16) & (o_j < 16)
    b_g = tl.load(p_g, mask=m, other=0.0)
    b_i = tl.where((o_i == o_j) & (o_s >= 0), 1.0, 0.0)
    b_x = b_i
    for _ in range(8):
        b_x = tl.dot(b_g, b_x, acc=b_i, input_precision=DOT)
    # every thread has read before one writes
    tl.debug_barrier()
    tl.store(p_g, b_x, mask=m)
    tl.debug_barrier()


@triton.jit
def _store_readout(p_out, b_y, o_p, o_c):
    """One tile of Y, in two bf16 terms."""
    p_out = p_out + o_p[:, None] * COLUMNS + o_c[None, :]
    m = (o_p < ROWS)[:, None] & (o_c < COLUMNS)[None, :]
    b_y1 = _coarse(b_y)
    tl.store(p_out, b_y1.to(tl.bfloat16), mask=m)
    tl.store(p_out + ROWS * COLUMNS, (b_y - b_y1).to(tl.bfloat16), mask=m)


@triton.jit
def _factor(
    qkv,
    vectors,
    decays,
    rates,
    parents,
    ancestors,
    p_prod,
    readout,
    inverse,
    scales,
    reach,
    first,
    i_b,
    HEADS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Y = C (I + G)^-1 of HEADS value heads, and the scales of their nodes.

    Y (I + G) = C, by columns, last first: a column block is C and what later blocks take from it,
    times its own inverse.  -G of the nodes that have columns goes by way of p_prod.
    """
    i_k = first // 1
    p_rq = vectors + (i_b * (2 * HK) + i_k) * T
    p_rk = p_rq + HK * T
    p_q = qkv + i_b * (T * C) + i_k * DK
    p_k = p_q + HK * DK
    for i_h in range(first, first + HEADS):
        # first: what these loads bring in, the products need again
        p_dec = decays + (i_b * (HV) + i_h) * T
        p_scale = scales + (i_b * HV + i_h) * (4 * ROWS)
        _scales(p_q, p_k, p_rq, p_rk, p_dec, p_scale)
    ancestors = ancestors + i_b * (2 * T)
    p_rates = rates + i_b * (T * HV * DK) + first * DK
    p_reach = reach + (i_b * HV + first) * (2 * 2 * T * DK)
    parents = parents + i_b * T
    p_dec = decays + (i_b * (HV) + first) * T
    p_scale = scales + (i_b * HV + first) * (4 * ROWS)
    p_read = readout + (i_b * HV + first) * (2 * ROWS * COLUMNS)
    o_p = tl.arange(0, 64)
    o_n = o_p
    m_n = (o_n < T) & (o_p < ROWS)
    o_c = tl.arange(0, 64)
    o_m = tl.arange(0, 64)
    m_m = o_m < 64
    b_kk0, b_qk0 = _gram(p_q, p_k, o_n, m_n, o_m, m_m, DOT, p_rates, p_reach, parents)

    i_m, i_t = 0, 0
    b_kk, b_qk = b_kk0, b_qk0
    b_g, b_c = _pair(
        b_kk, b_qk, p_rq, p_rk, p_dec, p_scale, ancestors, o_n, m_n, o_m, m_m, i_m, i_t
    )
    m_g = (o_p < COLUMNS)[:, None] & (o_c < COLUMNS)[None, :]
    tl.store(p_prod + o_p[:, None] * COLUMNS + o_c[None, :], b_g, mask=m_g)
    b_h0, b_h1 = _halves(b_c)
    b_c0, b_c1 = _halves(b_h0)
    b_c2, b_c3 = _halves(b_h1)
    tl.debug_barrier()
    _invert(p_prod, 0, DOT)
    o_j = 48 + tl.arange(0, 16)
    b_x3 = tl.load(p_prod + o_j[:, None] * COLUMNS + o_j[None, :])
    o_j = 32 + tl.arange(0, 16)
    o_k = 48 + tl.arange(0, 16)
    b_g3_2 = tl.load(p_prod + o_k[:, None] * COLUMNS + o_j[None, :])
    b_x2 = tl.load(p_prod + o_j[:, None] * COLUMNS + o_j[None, :])
    o_j = 16 + tl.arange(0, 16)
    o_k = 32 + tl.arange(0, 16)
    b_g2_1 = tl.load(p_prod + o_k[:, None] * COLUMNS + o_j[None, :])
    o_k = 48 + tl.arange(0, 16)
    b_g3_1 = tl.load(p_prod + o_k[:, None] * COLUMNS + o_j[None, :])
    b_x1 = tl.load(p_prod + o_j[:, None] * COLUMNS + o_j[None, :])
    o_j = tl.arange(0, 16)
    o_k = 16 + tl.arange(0, 16)
    b_g1_0 = tl.load(p_prod + o_k[:, None] * COLUMNS + o_j[None, :])
    o_k = 32 + tl.arange(0, 16)
    b_g2_0 = tl.load(p_prod + o_k[:, None] * COLUMNS + o_j[None, :])
    o_k = 48 + tl.arange(0, 16)
    b_g3_0 = tl.load(p_prod + o_k[:, None] * COLUMNS + o_j[None, :])
    b_x0 = tl.load(p_prod + o_j[:, None] * COLUMNS + o_j[None, :])

    # columns 48 to 63: 16 nodes of a topology at run time
    b_y3 = b_c3
    b_y3 = tl.dot(b_y3, b_x3, input_precision=DOT)

    # columns 32 to 47: 16 nodes of a topology at run time
    b_y2 = b_c2
    b_y2 = tl.dot(b_y3, b_g3_2, acc=b_y2, input_precision=DOT)
    b_y2 = tl.dot(b_y2, b_x2, input_precision=DOT)

    # columns 16 to 31: 16 nodes of a topology at run time
    b_y1 = b_c1
    b_y1 = tl.dot(b_y2, b_g2_1, acc=b_y1, input_precision=DOT)
    b_y1 = tl.dot(b_y3, b_g3_1, acc=b_y1, input_precision=DOT)
    b_y1 = tl.dot(b_y1, b_x1, input_precision=DOT)

    # columns 0 to 15: 16 nodes of a topology at run time
    b_y0 = b_c0
    b_y0 = tl.dot(b_y1, b_g1_0, acc=b_y0, input_precision=DOT)
    b_y0 = tl.dot(b_y2, b_g2_0, acc=b_y0, input_precision=DOT)
    b_y0 = tl.dot(b_y3, b_g3_0, acc=b_y0, input_precision=DOT)
    b_y0 = tl.dot(b_y0, b_x0, input_precision=DOT)
    _store_readout(p_read, b_y0, o_p, tl.arange(0, 16))
    _store_readout(p_read, b_y1, o_p, 16 + tl.arange(0, 16))
    _store_readout(p_read, b_y2, o_p, 32 + tl.arange(0, 16))
    _store_readout(p_read, b_y3, o_p, 48 + tl.arange(0, 16))


@triton.jit
def factor_kda_any64_d8_h32x32(
    qkv,
    slots,
    vectors,
    decays,
    rates,
    parents,
    ancestors,
    products,
    readout,
    inverse,
    scales,
    reach,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """What solve needs of HEADS value heads, ready-made.  Grid (Hv / HEADS, B)."""
    i_h, i_b = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + i_b)
    if OVERLAP:
        # prepare is done; solve may start on what it has left
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        return
    p_prod = products + (i_b * HV + i_h) * (COLUMNS * COLUMNS)
    _factor(
        qkv,
        vectors,
        decays,
        rates,
        parents,
        ancestors,
        p_prod,
        readout,
        inverse,
        scales,
        reach,
        i_h,
        i_b,
        HEADS,
        DOT,
    )


@triton.jit
def solve_kda_any64_d8_h32x32(
    qkv,
    state,
    slots,
    vectors,
    decays,
    rates,
    parents,
    ancestors,
    products,
    readout,
    inverse,
    scales,
    reach,
    u,
    out,
    pending_nodes,
    pending_live,
    pending_parents,
    pending_rows,
    pending_kept,
    pending_window_keys,
    pending_gates,
    pending_rates,
    pending_keys,
    pending_u,
    window,
    stride_window,
    nodes,
    stride_slot,
    stride_ob,
    stride_ot,
    stride_oh,
    MERGED: tl.constexpr,
    OVERLAP: tl.constexpr,
    FOLD: tl.constexpr,
    DOT: tl.constexpr,
):
    """O of one value tile: R from state products, then O = (P o Q) S + Y R.

    Grid (DV / 64, Hv, B).  MERGED: no factor kernel ran; every value tile forms Y itself.
    OVERLAP: factor may still run; what it stores is read after gdc_wait().
    pending_nodes: first commit these nodes of the round before; nothing else reads this tile.
    """
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_v = i_v * 64 + tl.arange(0, 64)
    m_v = o_v < DV
    slot = tl.load(slots + i_b).to(tl.int64)
    p_s = state + slot * stride_slot + i_h * (DV * DK)
    p_o = out + i_b * stride_ob + i_h.to(tl.int64) * stride_oh + o_v[:, None]
    if slot < 0:
        b_zero = tl.zeros([64, 16], tl.float32)
        for i_t in range(4):
            o_n = i_t * 16 + tl.arange(0, 16)
            m_o = m_v[:, None] & (o_n < nodes)[None, :]
            tl.store(p_o + o_n[None, :] * stride_ot, b_zero.to(tl.bfloat16), mask=m_o)
        if OVERLAP:
            gdc_wait()
        return
    if pending_nodes is not None:
        last = _accepted(pending_nodes, pending_live, i_b)
        if last >= 0:
            _commit_pending(
                p_s,
                None if window is None else window + slot * stride_window,
                last,
                pending_parents,
                pending_rows,
                pending_kept,
                pending_window_keys,
                pending_gates,
                pending_rates,
                pending_keys,
                pending_u,
                i_b,
                i_h,
                i_v,
            )
        # other threads read what this one has written
        tl.debug_barrier()
    if MERGED:
        i_p = (i_b * HV + i_h) * 2 + i_v
        p_prod = products + i_p * (COLUMNS * COLUMNS)
        _factor(
            qkv,
            vectors,
            decays,
            rates,
            parents,
            ancestors,
            p_prod,
            readout,
            inverse,
            scales,
            reach,
            i_h,
            i_b,
            1,
            FOLD,
        )
        tl.debug_barrier()
    p_s = p_s + o_v[:, None] * DK
    p_qkv = qkv + i_b * (T * C)
    p_reach = reach + (i_b * HV + i_h) * (2 * 2 * T * DK)
    p_v = p_qkv + 2 * HK * DK + i_h * DV + o_v[:, None]
    p_scale = scales + (i_b * HV + i_h) * (4 * ROWS)
    p_y = readout + (i_b * HV + i_h) * (2 * ROWS * COLUMNS)
    if OVERLAP:
        gdc_wait()

    # the state against k and q of every node, as one operand with columns k0 q0 k1 q1 ...
    o_c = tl.arange(0, 128)
    o_n = o_c // 2
    m_kq0 = o_n < 64
    o_kq0 = (2 * o_n + o_c % 2) * DK
    b_a0 = tl.zeros([64, 128], tl.float32)
    for i_d in range(4):
        o_d = i_d * 32 + tl.arange(0, 32)
        m_d = o_d < DK
        m_s = m_v[:, None] & m_d[None, :]
        b_s = tl.load(p_s + o_d[None, :], mask=m_s, other=0.0, eviction_policy="evict_first")
        # rows that decay by channel take two bf16 terms as well as the state
        b_s1 = _coarse(b_s)
        b_s2 = (b_s - b_s1).to(tl.bfloat16)
        b_s1 = b_s1.to(tl.bfloat16)
        p_b = p_reach + o_kq0[None, :] + o_d[:, None]
        m_b = m_kq0[None, :] & m_d[:, None]
        b_kq = tl.load(p_b, mask=m_b, other=0.0)
        b_l = tl.load(p_b + 2 * T * DK, mask=m_b, other=0.0)
        b_a0 = tl.dot(b_s1, b_l, acc=b_a0)
        b_a0 = tl.dot(b_s2, b_kq, acc=b_a0)
        b_a0 = tl.dot(b_s1, b_kq, acc=b_a0)
    o_n = tl.arange(0, 64)
    m_o = m_v[:, None] & (o_n < 64)[None, :]
    b_v0 = tl.load(p_v + o_n[None, :] * C, mask=m_o, other=0.0)
    o_p = tl.arange(0, 64)
    b_beta0 = tl.load(p_scale + o_p)
    b_gate0 = tl.load(p_scale + ROWS + o_p)
    b_rq0 = tl.load(p_scale + 2 * ROWS + o_p)

    # positions 0 to 63
    b_ks, b_qs = tl.split(tl.reshape(b_a0, [64, 64, 2]))  # [B_V, nodes]
    b_r = b_beta0[None, :] * b_v0.to(tl.float32) - b_gate0[None, :] * b_ks
    b_o = b_rq0[None, :] * b_qs
    b_h = _coarse(b_r)
    b_r0l = (b_r - b_h).to(tl.bfloat16)
    b_r0h = b_h.to(tl.bfloat16)
    o_p = tl.arange(0, 64)
    o_c = tl.arange(0, 64)
    p_m = o_p[None, :] * COLUMNS + o_c[:, None]
    b_y00h = tl.load(p_y + p_m)
    b_y00l = tl.load(p_y + ROWS * COLUMNS + p_m)
    b_o = tl.dot(b_r0l, b_y00h, acc=b_o)
    b_o = tl.dot(b_r0h, b_y00l, acc=b_o)
    b_o = tl.dot(b_r0h, b_y00h, acc=b_o)
    o_n = tl.arange(0, 64)
    m_all = m_v[:, None] & (o_n < nodes)[None, :]
    tl.store(p_o + o_n[None, :] * stride_ot, b_o.to(tl.bfloat16), mask=m_all)


@triton.jit
def _path(parents, last):
    """Nodes from `last` up to the root, -1 behind, and how many there are."""
    o_l = tl.arange(0, 16)
    b_up = tl.where(o_l == 0, last, -1)
    n = (last >= 0).to(tl.int32)
    b_at = last
    for i in range(1, DEPTH + 1):
        b_at = tl.where(b_at > 0, _parent(parents, b_at), -1)
        b_up = tl.where(o_l == i, b_at, b_up)
        n += (b_at >= 0).to(tl.int32)
    return b_up, n


@triton.jit
def _row(b_up, n, i):
    """The kept row of entry i of a path from the root: a node, -1 behind its end.

    Above the root a path runs on into the old window, at -1, -2 ...
    """
    b_at = tl.max(tl.where(tl.arange(0, 16) == n - 1 - i, b_up, -1), 0)
    return tl.where(i < 0, i, b_at)


@triton.jit
def _accepted(nodes, live, i_b):
    """The node that row i_b accepted, -1 for none: a dead node or one out of range is none."""
    node = tl.load(nodes + i_b).to(tl.int64)
    m = (node >= 0) & (node < T)
    node = tl.where(m, node, 0).to(tl.int32)
    m = m & (tl.load(live + i_b * T + node) != 0)
    return tl.where(m, node, -1)


@triton.jit
def _window_row(p_old, p_rows, row, o_c, m_c):
    """Row `row` of a path, channels o_c: a node's, or above the root the old window's."""
    b_x = tl.load(p_rows + row * C + o_c, mask=m_c & (row >= 0), other=0.0)
    p_x = p_old + o_c * (W - 1) + (W - 1) + row
    return tl.load(p_x, mask=m_c & (row < 0), other=b_x)


@triton.jit
def _commit_window(p_w, p_old, p_rows, b_up, n, n_a, o_c, m_c):
    """The window after n_a of a path's n nodes, channels o_c, from the old one and nodes' rows."""
    b_x0 = _window_row(p_old, p_rows, _row(b_up, n, n_a - 3), o_c, m_c)
    b_x1 = _window_row(p_old, p_rows, _row(b_up, n, n_a - 2), o_c, m_c)
    b_x2 = _window_row(p_old, p_rows, _row(b_up, n, n_a - 1), o_c, m_c)
    # in place: every thread has read before one writes
    tl.debug_barrier()
    tl.store(p_w + o_c * (W - 1), b_x0, mask=m_c)
    tl.store(p_w + o_c * (W - 1) + 1, b_x1, mask=m_c)
    tl.store(p_w + o_c * (W - 1) + 2, b_x2, mask=m_c)


@triton.jit
def _fetch(p_rows, p_gates, b_up, n, i, o_k, m_k, o_v, m_v, p_rates):
    """Entry i of a path: its rows of k and v, decays and write gate; 0 behind its end."""
    row, m = _row(b_up, n, i), i < n
    b_k = tl.load(p_rows + row * C + o_k, mask=m_k & m, other=0.0)
    b_v = tl.load(p_rows + row * C + o_v, mask=m_v & m, other=0.0)
    b_e = tl.load(p_rates + row * (HV * DK), mask=m_k & m, other=1.0)
    beta = tl.load(p_gates + row * (HV), mask=m, other=0.0)
    return b_k, b_v, b_e, beta


@triton.jit
def _fetch_taps(p_kept, o_c, m_c):
    """Bias and convolution weights of channels o_c, oldest tap first, float32."""
    b_bias = tl.load(p_kept + W * C + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_w0 = tl.load(p_kept + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_w1 = tl.load(p_kept + 1 * C + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_w2 = tl.load(p_kept + 2 * C + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_w3 = tl.load(p_kept + 3 * C + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_bias, b_w0, b_w1, b_w2, b_w3


@triton.jit
def _fetch_before(p_w, o_w, m):
    """Entries of the committed window, float32; none where rows come convolved."""
    if p_w is None:
        return tl.zeros(m.shape, tl.float32)
    else:
        return tl.load(p_w + o_w, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _replay(b_x3, b_x2, b_x1, b_x0, b_bias, b_w0, b_w1, b_w2, b_w3, CONVOLVED: tl.constexpr):
    """A node's row as verify convolved it, from those above it and its own: float32."""
    if CONVOLVED:
        return b_x0
    b_y = b_bias
    b_y = tl.fma(b_x3, b_w0, b_y)
    b_y = tl.fma(b_x2, b_w1, b_y)
    b_y = tl.fma(b_x1, b_w2, b_y)
    b_y = tl.fma(b_x0, b_w3, b_y)
    return _silu(b_y).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _sum_over_d(b_x):
    """[DK / 32, N, 32] -> [N]: most of the sum lies within a thread."""
    return tl.sum(tl.sum(b_x, 0), 1)


@triton.jit
def _commit_state(
    p_s,
    b_s,
    m_s,
    p_track,
    n_track,
    p_rows,
    p_kept,
    p_before,
    p_w,
    p_track_w,
    p_gates,
    p_rates,
    b_up,
    n,
    o_k,
    m_k,
    o_v,
    m_v,
    CONVOLVED: tl.constexpr,
):
    """Run the recurrence along the accepted path; store after n_track nodes and after n, and v's
    window with it, which nothing else reads."""
    b_kb, b_kw0, b_kw1, b_kw2, b_kw3 = _fetch_taps(p_kept, o_k, m_k)
    b_vb, b_vw0, b_vw1, b_vw2, b_vw3 = _fetch_taps(p_kept, o_v, m_v)
    b_k3 = _fetch_before(p_before, 0 * (HK * DK), m_k)
    b_v3 = _fetch_before(p_w, o_v * (W - 1), m_v)
    b_k2 = _fetch_before(p_before, 1 * (HK * DK), m_k)
    b_v2 = _fetch_before(p_w, o_v * (W - 1) + 1, m_v)
    b_k1 = _fetch_before(p_before, 2 * (HK * DK), m_k)
    b_v1 = _fetch_before(p_w, o_v * (W - 1) + 2, m_v)
    # the rows of 4 nodes are on their way while one is used
    row0 = _fetch(p_rows, p_gates, b_up, n, 0, o_k, m_k, o_v, m_v, p_rates)
    row1 = _fetch(p_rows, p_gates, b_up, n, 1, o_k, m_k, o_v, m_v, p_rates)
    row2 = _fetch(p_rows, p_gates, b_up, n, 2, o_k, m_k, o_v, m_v, p_rates)
    row3 = _fetch(p_rows, p_gates, b_up, n, 3, o_k, m_k, o_v, m_v, p_rates)
    for i in range(0, n):
        b_k0, b_v0, b_e, beta = row0
        b_k0, b_v0 = b_k0.to(tl.float32), b_v0.to(tl.float32)
        b_key = _replay(b_k3, b_k2, b_k1, b_k0, b_kb, b_kw0, b_kw1, b_kw2, b_kw3, CONVOLVED)
        b_u = _replay(b_v3, b_v2, b_v1, b_v0, b_vb, b_vw0, b_vw1, b_vw2, b_vw3, CONVOLVED)
        b_k3, b_v3 = b_k2, b_v2
        b_k2, b_v2 = b_k1, b_v1
        b_k1, b_v1 = b_k0, b_v0
        b_kk = tl.sum(tl.sum(b_key * b_key, 1), 0) + 1e-6
        b_key = b_key[:, None, :]
        b_s = b_s * b_e[:, None, :]
        row0 = row1
        row1 = row2
        row2 = row3
        row3 = _fetch(p_rows, p_gates, b_up, n, i + 4, o_k, m_k, o_v, m_v, p_rates)
        b_u = b_u - tl.rsqrt(b_kk) * _sum_over_d(b_s * b_key)
        b_u = beta * tl.rsqrt(b_kk) * b_u
        b_s += b_u[None, :, None] * b_key
        if p_track is not None and i + 1 == n_track:
            tl.store(p_track, b_s.to(tl.float32), mask=m_s)
            if not CONVOLVED:
                tl.store(p_track_w + o_v * (W - 1), b_v3.to(tl.bfloat16), mask=m_v)
                tl.store(p_track_w + o_v * (W - 1) + 1, b_v2.to(tl.bfloat16), mask=m_v)
                tl.store(p_track_w + o_v * (W - 1) + 2, b_v1.to(tl.bfloat16), mask=m_v)
    # in place: every thread has read before one writes
    tl.debug_barrier()
    if not CONVOLVED:
        tl.store(p_w + o_v * (W - 1), b_v3.to(tl.bfloat16), mask=m_v)
        tl.store(p_w + o_v * (W - 1) + 1, b_v2.to(tl.bfloat16), mask=m_v)
        tl.store(p_w + o_v * (W - 1) + 2, b_v1.to(tl.bfloat16), mask=m_v)
    tl.store(p_s, b_s.to(tl.float32), mask=m_s)


@triton.jit
def commit_kda_any64_d8_h32x32(
    state,
    window,
    slots,
    nodes,
    track_slots,
    track_nodes,
    rows,
    kept,
    window_keys,
    gates,
    rates,
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

    Grid (Hv DV / 32 + 2 Hk DK / 512, B, layers): 32 rows of a head's state and v's window
    each, then 512 channels of the window of q and k.
    """
    i_r, i_b, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    last = _accepted(nodes, live, i_b)
    if (slot < 0) | (last < 0):
        return
    parents = parents + i_b * T
    b_up, n = _path(parents, last)
    # tracked only where it lies on the accepted path
    n_track, track_slot = n * 0, slot
    if track_slots is not None:
        track = _accepted(track_nodes, live, i_b)
        to = tl.load(track_slots + i_b).to(tl.int64)
        o_l = tl.arange(0, 16)
        m_track = (track >= 0) & (to >= 0)
        n_track = tl.max(tl.where(m_track & (b_up == track), n - o_l, 0), 0)
        track_slot = tl.where(n_track > 0, to, slot)
    i_row = i_l * capacity + i_b
    p_rows = rows + i_row * (T * C)
    p_w, p_track_w = None, None
    if not CONVOLVED:
        p_w = window + i_l * stride_wl + slot * stride_ws
        p_track_w = window + i_l * stride_wl + track_slot * stride_ws
    if not CONVOLVED and i_r >= 128:
        o_c = (i_r - 128) * 512 + tl.arange(0, 512)
        m_c = o_c < 2 * HK * DK
        if n_track > 0:
            _commit_window(p_track_w, p_w, p_rows, b_up, n, n_track, o_c, m_c)
        _commit_window(p_w, p_w, p_rows, b_up, n, n, o_c, m_c)
        return
    i_h = i_r // 4
    i_k = i_h // 1
    o_v = (i_r % 4) * 32 + tl.arange(0, 32)
    m_v = o_v < DV
    o_d = tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    m_d = o_d < DK
    m_s = m_d[:, None, :] & m_v[None, :, None]
    p_s = state + i_l * stride_sl + i_h * (DV * DK) + o_v[None, :, None] * DK + o_d[:, None, :]
    # the 2 is not true of the addresses: it only ranks the rows above the pieces of d_k, so that a
    # warp spreads over rows; loads are vectors along the last axis alone
    p_to = tl.max_contiguous(p_s + slot * stride_ss, [1, 2, 32])
    p_track = tl.max_contiguous(p_s + track_slot * stride_ss, [1, 2, 32])
    b_s = tl.load(p_to, mask=m_s, other=0.0).to(tl.float32)
    _commit_state(
        p_to,
        b_s,
        m_s,
        p_track,
        n_track,
        p_rows,
        kept + i_l * (C * (W + 1)),
        None if CONVOLVED else window_keys + (i_row * ((W - 1) * HK) + i_k) * DK + o_d,
        p_w,
        p_track_w,
        gates + i_row * (T * HV) + i_h,
        rates + i_row * (T * HV * DK) + i_h * DK + o_d,
        b_up,
        n,
        (HK + i_k) * DK + o_d,
        m_d,
        2 * HK * DK + i_h * DV + o_v,
        m_v,
        CONVOLVED,
    )


@triton.jit
def _commit_pending(
    p_s,
    p_w,
    last,
    parents,
    rows,
    kept,
    window_keys,
    gates,
    rates,
    keys,
    u,
    i_b,
    i_h,
    i_v,
):
    """The round before, in place: a value tile of row i_b's state and a share of its window."""
    i_k = i_h // 1
    o_v = i_v * 64 + tl.arange(0, 64)
    m_v = o_v < DV
    o_d = tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    m_d = o_d < DK
    m_s = m_d[:, None, :] & m_v[None, :, None]
    # spread over warps as in commit
    p_s = tl.max_contiguous(p_s + o_v[None, :, None] * DK + o_d[:, None, :], [1, 2, 32])
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
    parents = parents + i_b * T
    b_up, n = _path(parents, last)
    p_rows = rows + i_b * (T * C)
    if p_w is not None:
        o_c = (i_h * 2 + i_v) * 128 + tl.arange(0, 128)
        m_c = o_c < 2 * HK * DK
        _commit_window(p_w, p_w, p_rows, b_up, n, n, o_c, m_c)
    _commit_state(
        p_s,
        b_s,
        m_s,
        None,
        0,
        p_rows,
        kept,
        None if p_w is None else window_keys + (i_b * ((W - 1) * HK) + i_k) * DK + o_d,
        p_w,
        None,
        gates + i_b * (T * HV) + i_h,
        rates + i_b * (T * HV * DK) + i_h * DK + o_d,
        b_up,
        n,
        (HK + i_k) * DK + o_d,
        m_d,
        2 * HK * DK + i_h * DV + o_v,
        m_v,
        p_w is None,
    )


@dataclass
class Factors:
    """All memory of a round for up to `batch` rows and `layers` layers; see allocate().

    Until acceptance, for commit to replay the accepted path from:
        rows [L, B, T, C]: what verify was given
        window_keys [L, B, W-1, Hk, dk]: k's part of the committed window
        kept [L, W+1, C]: convolution weights and bias
        gates [L, B, T, Hv] float32: write gate
        rates [L, B, T, Hv, dk] float32: decays
        live [B, T] int8
        parents [B, T] int32
    One layer's scratch:
        qkv [B, T, C]: rows after the convolution
        window_rows [B, W-1, C]: the committed window, as rows
        vectors [B, 2, Hk, T] float32: scale/|q| and 1/|k|
        decays [B, 1, Hv, T] float32: write gate
        products [B, Hv, COLUMNS, COLUMNS] float32: -G, then its blocks' inverses
        readout [B, Hv, 2, ROWS, COLUMNS]: Y in two bf16 terms
        scales [B, Hv, 4, ROWS] float32
        reach [B, Hv, 2, T, 2, dk]: P o K, P o Q in two bf16 terms
        ancestors [B, T/32, T] int32: a bit a node

    Set `traced = True` for the layers after the first of a round: verify then reads the topology
    that the first one left here, and launches one kernel less.
    Set `check = False` to skip argument checks; those of contents synchronise, and are skipped
    during graph capture as well.
    """

    rows: torch.Tensor
    window_keys: torch.Tensor
    kept: torch.Tensor
    gates: torch.Tensor
    rates: torch.Tensor
    keys: torch.Tensor | None
    u: torch.Tensor | None
    live: torch.Tensor
    parents: torch.Tensor
    qkv: torch.Tensor
    window_rows: torch.Tensor
    vectors: torch.Tensor
    decays: torch.Tensor
    products: torch.Tensor
    readout: torch.Tensor
    inverse: torch.Tensor | None
    scales: torch.Tensor
    reach: torch.Tensor
    ancestors: torch.Tensor
    check: bool = True
    traced: bool = False
    overlap: bool = False  # solve starts beside factor and waits inside: sm_90 and later
    convolved: bool = False  # rows came from verify_qkv

    @property
    def layers(self) -> int:
        """Layers there is room for."""
        return self.rows.shape[0]

    @property
    def batch(self) -> int:
        """Rows there is room for."""
        return self.live.shape[0]

    def convolved_rows(self, layer: int) -> torch.Tensor:
        """Rows that the recurrence of the layer verified last was given: [B, T, C]."""
        kept = self.rows[layer] if self.convolved else self.qkv
        return kept

    @property
    def round_bytes(self) -> int:
        """Bytes that live until acceptance."""
        kept = (self.rows, self.window_keys, self.kept, self.gates, self.rates, self.live)
        kept = (*kept, self.parents)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of one layer's scratch, reused by every layer."""
        scratch = (self.qkv, self.window_rows, self.vectors, self.decays, self.products)
        scratch = (*scratch, self.readout, self.scales, self.reach, self.ancestors)
        return sum(t.numel() * t.element_size() for t in scratch if t is not None)


def allocate(batch: int, layers: int, device: torch.device | str) -> Factors:
    """All memory of a round; verify and commit allocate nothing when `out` is given."""
    for name, value, least in (("batch", batch, 0), ("layers", layers, 1)):
        if type(value) is not int or not least <= value < 1 << 31:
            raise ValueError(f"{name}: expected a whole number from {least}, got {value!r}")
    try:
        device = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device: expected one that torch has here, got {device!r}") from error

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Factors(
        rows=empty(layers, batch, 64, 12288, dtype=MODULE.dtype),
        window_keys=empty(layers, batch, 3, 32, 128, dtype=MODULE.dtype),
        kept=empty(layers, 5, 12288, dtype=MODULE.dtype),
        gates=empty(layers, batch, 64, 32),
        rates=empty(layers, batch, 64, 32, 128),
        keys=None,
        u=None,
        live=torch.zeros(batch, 64, dtype=torch.int8, device=device),
        parents=empty(batch, 64, dtype=torch.int32),
        qkv=empty(batch, 64, 12288, dtype=MODULE.dtype),
        window_rows=empty(batch, 3, 12288, dtype=MODULE.dtype),
        vectors=empty(batch, 2, 32, 64),
        decays=empty(batch, 1, 32, 64),
        # where solve is merged with factor, each value tile has its own
        products=empty(max(batch, 2), 32, 64, 64),
        readout=empty(batch, 32, 2, 64, 64, dtype=torch.bfloat16),
        inverse=None,
        scales=empty(batch, 32, 4, 64),
        reach=empty(batch, 32, 2, 64, 2, 128, dtype=torch.bfloat16),
        ancestors=empty(batch, 2, 64, dtype=torch.int32),
        overlap=_can_overlap(device),
    )


def _can_overlap(device: torch.device) -> bool:
    """Whether a kernel of this device may start before the one that it waits for has ended."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


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
    pending=None,
):
    """Score every node of B trees from their slots' states: out [B, T, Hv, dv] in x's dtype.

    x [B, T, C]: pre-convolution rows q|k|v, unit last stride.  a [B, T, Hv, dk], unit last stride.
    b [B, T, Hv], any strides.  conv_weight [C, W], conv_bias [C] or None.  A_log [Hv].  dt_bias
    [Hv, dk].  state [slots, Hv, dv, dk] and conv_state [slots, C, W-1] (oldest first) are only
    read.  slots [B], negative = padded row.
    parents [B, T], -1 at node 0.
    live [B, T] bool, prefix-closed, None = all.  Dead and padded rows give zeros.
    pending (factors, last_node [B]): what commit() of the round before would have been given, row
    by row; its factors are others than this round's.  state and conv_state are then written as by
    that commit, within the contract: call no commit() for it, and verify every layer so.
    Raises ValueError, before any launch, for a wrong shape, dtype, device or stride.
    """
    if _checks(factors):
        _expect("slots", slots, (None,), _INTEGERS, None)
        shape = (slots.shape[0], None, 12288)
        _expect("x", x, shape, (MODULE.dtype,), None, (None, None, 1))
        _expect("conv_weight", conv_weight, (12288, 4), (MODULE.dtype,), x.device, (4, 1))
        if conv_bias is not None:
            _expect("conv_bias", conv_bias, (12288,), (MODULE.dtype,), x.device, (1,))
        shape = (None, 12288, 3)
        _expect("conv_state", conv_state, shape, (MODULE.dtype,), x.device, (None, 3, 1))
    s_b, s_t = x.stride(0), x.stride(1)
    return _verify(
        (x, s_b, s_t, 128),
        (x[..., 4096:], s_b, s_t, 128),
        (x[..., 8192:], s_b, s_t, 128),
        (a, b, A_log, dt_bias),
        (conv_weight, conv_bias, conv_state, conv_state.stride(0)),
        (state, slots, factors, layer),
        (parents, live, out, schedule, pending),
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
    pending=None,
):
    """verify() for engines with a convolution of their own; commit then takes conv_state=None.

    q, k [B, T, Hk, dk] and v [B, T, Hv, dv] after the convolution, before the norm, unit last
    stride; everything else as in verify().
    """
    if _checks(factors):
        _expect("slots", slots, (None,), _INTEGERS, None)
        shape, unit = (slots.shape[0], None, 32, 128), (None, None, None, 1)
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
        (parents, live, out, schedule, pending),
    )


def _verify(q, k, v, gate, conv, pool, options):
    """Both verifies: q, k, v are (tensor, batch, node and head stride)."""
    a, b, A_log, dt_bias = gate
    state, slots, f, layer = pool
    parents, live, out, _, pending = options
    batch, n = q[0].shape[:2]
    if f.check:
        _check_verify(q[0], n, gate, conv[2], pool, options)
    f.convolved = conv[0] is None
    if out is None:
        out = q[0].new_empty(batch, n, 32, 128)
    if batch == 0:
        return out
    with _on(q[0]):
        if not f.traced:
            s_l = (0, 0) if live is None else live.stride()
            trace_kda_any64_d8_h32x32[(8, batch)](
                parents,
                live,
                slots,
                f.parents,
                f.live,
                f.ancestors,
                *parents.stride(),
                *s_l,
                n,
                HAS_LIVE=live is not None,
                num_warps=1,
            )
        # rows that need no convolution are read from where they are kept
        qkv = f.rows[layer] if f.convolved else f.qkv
        past = _pending_of(pending, layer)
        masked = True
        # few requests: more programs, of fewer nodes; many: each head's rows fetched once
        tiles = 8 if batch >= 16 else 1
        if 4 <= batch < 16:
            tiles = 4
        programs = 136 + 96 * -(-8 // tiles)
        prepare_kda_any64_d8_h32x32[(programs, batch)](
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
            *past[:4],
            qkv,
            f.rows[layer],
            f.window_rows,
            f.window_keys[layer],
            f.kept[layer],
            f.gates[layer],
            f.rates[layer],
            None,
            f.vectors,
            f.decays,
            *q[1:],
            *k[1:],
            *v[1:],
            *a.stride()[:3],
            *b.stride(),
            conv[3],
            CONVOLVE=conv[0] is not None,
            MASKED=masked,
            TILES=tiles,
            num_warps=4,
        )
        overlap = f.overlap
        beside = {"launch_pdl": True} if overlap else {}
        merged = batch <= 1 and not overlap
        if not merged:
            heads = 1
            factor_kda_any64_d8_h32x32[(32 // heads, batch)](
                qkv,
                slots,
                f.vectors,
                f.decays,
                f.rates[layer],
                f.parents,
                f.ancestors,
                f.products,
                f.readout,
                f.inverse,
                f.scales,
                f.reach,
                HEADS=heads,
                OVERLAP=overlap,
                DOT=FOLD,
                num_warps=4,
                num_stages=1,
                **FACTOR_CAP,
                **beside,
            )
        solve_kda_any64_d8_h32x32[(2, 32, batch)](
            qkv,
            state,
            slots,
            f.vectors,
            f.decays,
            f.rates[layer],
            f.parents,
            f.ancestors,
            f.products,
            f.readout,
            f.inverse,
            f.scales,
            f.reach,
            None,
            out,
            *past,
            *((None, 0) if pending is None else conv[2:]),
            n,
            state.stride(0),
            *out.stride()[:3],
            MERGED=merged,
            OVERLAP=overlap,
            FOLD=FOLD,
            DOT=DOT,
            num_warps=4,
            num_stages=3,
            **({} if merged else CAP if pending is None else FOLDED_CAP),
            **beside,
        )
    return out


def _pending_of(pending, layer):
    """What kernels take of the round before: its accepted nodes, its tree, a layer's factors."""
    if pending is None:
        return (None,) * 10
    f, last_node = pending
    return (
        last_node,
        f.live,
        f.parents,
        f.rows[layer],
        f.kept[layer],
        f.window_keys[layer],
        f.gates[layer],
        f.rates[layer],
        None,
        None,
    )


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
    an ancestor of the accepted node (or itself) into another slot, which no other row has; -1 =
    none.  The topology is the one that verify stored, `parents` is only checked.
    Raises ValueError, before any launch, for a wrong shape, dtype, device or stride.
    """
    f = factors
    if _checks(f):
        _check_commit(f, state, conv_state, slots, last_node, parents, track_slots, track_node)
    batch, layers = slots.shape[0], state.shape[0]
    if batch == 0:
        return
    s_w = (0, 0) if conv_state is None else conv_state.stride()[:2]
    programs = 128 if conv_state is None else 144
    with _on(state):
        commit_kda_any64_d8_h32x32[(programs, batch, layers)](
            state,
            conv_state,
            slots,
            last_node,
            track_slots,
            track_node,
            f.rows,
            f.kept,
            f.window_keys,
            f.gates,
            f.rates,
            f.keys,
            f.u,
            f.live,
            f.parents,
            f.batch,
            *state.stride()[:2],
            *s_w,
            CONVOLVED=conv_state is None,
            num_warps=1,
            num_stages=1,
        )


def flush(
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
    """commit() of a round that was to be pending, before its slots leave: finished, preempted,
    or read by others.  Arguments and errors are those of commit(); so are all bits.
    """
    commit(
        factors,
        state,
        conv_state,
        slots,
        last_node,
        parents=parents,
        track_slots=track_slots,
        track_node=track_node,
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
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        have = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected a tensor, got {have}")
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


def _expect_apart(name, tensor):
    """What is written has no two entries in one place."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end:
            raise ValueError(f"{name}: expected entries apart, got strides {tensor.stride()}")
        end += stride * (size - 1)


def _expect_runnable(name, device):
    """Kernels run on a GPU, and in the interpreter on the CPU."""
    if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
        raise ValueError(
            f"{name}: expected a GPU tensor, or TRITON_INTERPRET=1 from the start, got {device}"
        )


_INTEGERS = (torch.int32, torch.int64)


def _check_verify(x, n, gate, conv_state, pool, options):
    """Everything but the rows themselves; contents too, outside of graph capture."""
    a, b, A_log, dt_bias = gate
    state, slots, f, layer = pool
    parents, live, out, schedule, pending = options
    batch, device = x.shape[0], x.device
    rows = "q" if conv_state is None else "x"
    if not 1 <= n <= 64:
        raise ValueError(f"{rows}: expected 1 to 64 nodes, got {n}")
    if schedule not in (None, *MODULE.schedules):
        raise ValueError(f"schedule: expected one of {MODULE.schedules}, got {schedule!r}")
    _expect_runnable(rows, device)
    if batch > f.batch or f.live.device != device:
        raise ValueError(
            f"factors: expected room for batch {batch} on {device}, "
            f"got batch {f.batch} on {f.live.device}"
        )
    # torch takes True for a mask, not for 1
    if type(layer) is not int or layer not in range(f.layers):
        raise ValueError(f"layer: expected 0 to {f.layers - 1}, got {layer!r}")
    wide = (torch.float32, MODULE.dtype)
    _expect("a", a, (batch, n, 32, 128), wide, device, (None, None, None, 1))
    _expect("dt_bias", dt_bias, (32, 128), wide, device, (128, 1))
    for name, tensor in (("b", b),):
        _expect(name, tensor, (batch, n, 32), wide, device)
    for name, tensor in (("A_log", A_log),):
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
        _expect_apart("out", out)
        if n * out.stride(1) >= 1 << 31:
            raise ValueError(f"out: expected a node stride below 2^31 / {n}, got {out.stride(1)}")
    if live is not None:
        _expect("live", live, (batch, n), (torch.bool,), device)
    _expect("parents", parents, (batch, n), _INTEGERS, device)
    if pending is not None:
        _check_pending(pending, pool, conv_state, schedule)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _check_contents(state, slots, parents, live)
        if pending is not None and batch and int(pending[1].max()) >= 0:
            _check_kind(pending[0], conv_state)


def _check_pending(pending, pool, conv_state, schedule):
    """The round before, in factors of its own; the pools are written for it."""
    state, slots, f, layer = pool
    if schedule == "tiled":
        raise ValueError("pending: expected None under schedule 'tiled', which commits apart")
    if not isinstance(pending, tuple) or len(pending) != 2:
        raise ValueError(f"pending: expected (factors, last_node), got {type(pending).__name__}")
    before, last_node = pending
    if not isinstance(before, Factors):
        raise ValueError(
            f"pending: expected factors of allocate() of {MODULE.name}, "
            f"got {type(before).__name__}"
        )
    if before is f:
        raise ValueError("pending: expected other factors than this round's, which verify writes")
    batch, device = slots.shape[0], state.device
    if batch > before.batch or layer >= before.layers or before.live.device != device:
        raise ValueError(
            f"pending: expected factors of layer {layer} and {batch} rows on {device}, got "
            f"{before.layers} layers and {before.batch} rows on {before.live.device}"
        )
    _expect("pending last_node", last_node, (batch,), _INTEGERS, device, (1,))
    _expect_apart("state", state)
    if conv_state is not None:
        _expect_apart("conv_state", conv_state)


def _check_kind(before, conv_state):
    """A round of verify is committed with windows, one of verify_qkv without."""
    if before.convolved != (conv_state is None):
        kinds = ("verify_qkv", "verify") if before.convolved else ("verify", "verify_qkv")
        raise ValueError("pending: factors of {} are not for {}".format(*kinds))


def _check_contents(state, slots, parents, live):
    """Slots in range, parents a tree that is not too deep, live prefix-closed; synchronises."""
    if slots.numel() and int(slots.max()) >= state.shape[0]:
        raise ValueError(f"slots: expected below {state.shape[0]}, got {int(slots.max())}")
    trees = parents.tolist()
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
    device = f.live.device
    shape = (None, None, 32, 128, 128)
    _expect("state", state, shape, (MODULE.state_dtype,), device, (None, None, 16384, 128, 1))
    _expect("slots", slots, (None,), _INTEGERS, device, (1,))
    _expect_runnable("state", device)
    _expect_apart("state", state)
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
        shape = (layers, state.shape[1], 12288, 3)
        _expect("conv_state", conv_state, shape, (MODULE.dtype,), device, (None, None, 3, 1))
        _expect_apart("conv_state", conv_state)
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
        if track_slots is not None:
            _expect_own_tracks(slots.tolist(), track_slots.tolist())


def _expect_own_tracks(slots, tracks):
    """No two rows write one slot; a row may track into its own."""
    for row, slot in enumerate(tracks):
        others = slots[:row] + slots[row + 1 :] + tracks[:row]
        if slot >= 0 and slot in others:
            raise ValueError(f"track_slots: slot {slot} of row {row} is another row's as well")

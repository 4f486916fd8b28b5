# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One-token decode of a Gated DeltaNet layer, in place: what an engine runs without drafts."""

import torch
import triton
import triton.language as tl

__all__ = ["decode_step"]


def decode_step(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads: tuple[int, int],
) -> torch.Tensor:
    """Outputs [B, 1, Hv, d_v] of one token a request; state and conv_state move on.

    Arguments as of a generated module's verify, with one node.
    """
    rows, channels = x.shape[0], x.shape[2]
    key_heads, value_heads = heads
    d_v, d_k = state.shape[2:]
    qkv = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    out = torch.empty((rows, 1, value_heads, d_v), dtype=x.dtype, device=x.device)
    _convolve[(rows, triton.cdiv(channels, 512))](
        x, conv_weight, conv_state, slots, qkv, x.stride(0), channels,
        W=conv_weight.shape[1], BLOCK=512,
    )  # fmt: skip
    b_v = min(32, d_v)
    _recur[(rows * value_heads, triton.cdiv(d_v, b_v))](
        qkv, a, b, A_log, dt_bias, state, slots, out, a.stride(0), b.stride(0), channels,
        HK=key_heads, HV=value_heads, DK=d_k, DV=d_v, BV=b_v, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _convolve(
    p_x,
    p_weight,
    p_window,
    p_slots,
    p_out,
    stride_x,
    channels,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < channels
    slot = tl.load(p_slots + i_b).to(tl.int64)
    p_old = p_window + slot * channels * (W - 1) + o_c * (W - 1)
    b_x = tl.load(p_x + i_b * stride_x + o_c, m_c, other=0.0)
    b_y = b_x.to(tl.float32) * tl.load(p_weight + o_c * W + W - 1, m_c, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        b_old = tl.load(p_old + j, m_c, other=0.0)
        b_w = tl.load(p_weight + o_c * W + j, m_c, other=0.0)
        b_y += b_old.to(tl.float32) * b_w.to(tl.float32)
        if j > 0:
            tl.store(p_old + j - 1, b_old, m_c)
    tl.store(p_old + W - 2, b_x, m_c)
    b_y = b_y / (1.0 + tl.exp(-b_y))
    tl.store(p_out + i_b * channels + o_c, b_y.to(p_out.dtype.element_ty), m_c)


@triton.jit
def _recur(
    p_qkv, p_a, p_b, p_log, p_bias, p_state, p_slots, p_out, stride_a, stride_b, channels,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_b, i_h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    o_v, o_k = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, DK)
    p_row = p_qkv + i_b * channels
    i_k = i_h // (HV // HK)
    b_q = tl.load(p_row + i_k * DK + o_k).to(tl.float32)
    b_k = tl.load(p_row + (HK + i_k) * DK + o_k).to(tl.float32)
    b_v = tl.load(p_row + 2 * HK * DK + i_h * DV + o_v).to(tl.float32)
    b_q = b_q / tl.sqrt(tl.sum(b_q * b_q) + 1e-6) * (DK**-0.5)
    b_k = b_k / tl.sqrt(tl.sum(b_k * b_k) + 1e-6)
    gate = tl.load(p_a + i_b * stride_a + i_h).to(tl.float32) + tl.load(p_bias + i_h).to(
        tl.float32
    )
    soft = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(p_log + i_h).to(tl.float32)) * soft)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b + i_b * stride_b + i_h).to(tl.float32)))
    slot = tl.load(p_slots + i_b).to(tl.int64)
    p_s = p_state + (slot * HV + i_h) * DV * DK + o_v[:, None] * DK + o_k[None, :]
    b_s = tl.load(p_s) * decay
    b_u = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
    b_s += b_u[:, None] * b_k[None, :]
    tl.store(p_s, b_s)
    b_o = tl.sum(b_s * b_q[None, :], 1)
    tl.store(p_out + (i_b * HV + i_h) * DV + o_v, b_o.to(p_out.dtype.element_ty))

"""What a verifier must give, in float64 on the device, and how far from it an answer may lie.

The recurrence is that of ``bolegen.oracle``, node by node; a test holds the two together. It is
written again because numpy would need minutes for the largest cases.
"""

from dataclasses import dataclass

import torch

from benchmarks.operands import Operands, split_rows
from bolegen.ir import Decay
from bolegen_runtime.contract import LIMIT

__all__ = [
    "Exact",
    "committed_window",
    "over_contract",
    "over_relative",
    "relative_error",
    "solve_exactly",
]

_CHUNK_BYTES = 8 << 30


@dataclass(frozen=True)
class Exact:
    """One layer: o [B, T, Hv, dv], state [B, Hv, dv, dk] and window [B, C, W-1] at ``last``.

    The window means nothing where the mixer has no convolution.
    """

    o: torch.Tensor
    state: torch.Tensor
    window: torch.Tensor


def solve_exactly(r: Operands, layer: int) -> Exact:
    """The recurrence over the rounded rows of one layer."""
    shape = r.case.shape
    node_bytes = shape.value_heads * shape.d_v * shape.d_k * 8
    rows = max(1, _CHUNK_BYTES // (len(r.parents) * node_bytes))
    parts = [_solve(r, layer, slice(at, at + rows)) for at in range(0, r.case.batch, rows)]
    o, state = (torch.cat(part) for part in zip(*parts, strict=True))
    return Exact(o, state, committed_window(r, layer))


def over_contract(
    got: torch.Tensor, exact: torch.Tensor, dims: tuple[int, ...], limit: float = LIMIT
) -> float:
    """Largest error over the contract's limit; norms are taken over ``dims``."""
    once = torch.linalg.vector_norm(exact.to(got.dtype).double() - exact, dim=dims)
    allowed = limit * torch.linalg.vector_norm(exact, dim=dims)
    if got.dtype != torch.float32:
        allowed = torch.maximum(allowed, 1.1 * once)
    return _worst(torch.linalg.vector_norm(got.double() - exact, dim=dims), allowed)


def relative_error(got: torch.Tensor, exact: torch.Tensor, dims: tuple[int, ...]) -> float:
    """Largest error over the size of what is exact; norms are taken over ``dims``."""
    return over_relative(got, exact, dims, 1.0)


def over_relative(
    got: torch.Tensor, exact: torch.Tensor, dims: tuple[int, ...], limit: float
) -> float:
    """Largest relative error over ``limit``."""
    size = torch.linalg.vector_norm(exact, dim=dims)
    return _worst(torch.linalg.vector_norm(got.double() - exact, dim=dims), limit * size)


def _worst(error: torch.Tensor, limit: torch.Tensor) -> float:
    ratio = torch.where(error == 0, error, error / limit)  # exactly right, whatever the limit
    return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _solve(r: Operands, layer: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    mixer, ratio = r.case.shape.mixer, r.case.spec.ratio
    q, k, v = (part.double() for part in split_rows(r.case, r.rows[layer, rows]))
    if mixer.unit_keys:
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    q, k = (part.repeat_interleave(ratio, 2) for part in (q, k))
    decay, write = _decay(r, layer, rows), _write(r, layer, rows)
    pool = r.state[layer, r.slots[rows].long()].double()
    o, states = torch.empty_like(v), pool.new_empty(len(r.parents), *pool.shape)
    for node, parent in enumerate(r.parents):
        state = states[node]
        torch.mul(pool if parent < 0 else states[parent], decay[:, node], out=state)
        seen = (state @ k[:, node, :, :, None])[..., 0] if mixer.delta else 0.0
        u = write[:, node, :, None] * (v[:, node] - seen)
        state += u[..., :, None] * k[:, node, :, None, :]
        o[:, node] = (state @ q[:, node, :, :, None])[..., 0]
    if mixer.skip:
        o += r.D.double()[:, None] * v
    last = r.last[rows]
    return o, states[last, torch.arange(len(last), device=last.device)]


def _decay(r: Operands, layer: int, rows: slice) -> torch.Tensor:
    """What a state is multiplied by at each node: [B, T, Hv, 1, dk or 1]."""
    mixer, rate = r.case.shape.mixer, torch.exp(r.A_log.double())
    if mixer.decay is Decay.CHANNEL:
        rate = rate[:, None]
    step = r.a[layer, rows].double() + r.dt_bias.double()
    log_decay = {
        "0": torch.zeros_like(step),
        "-exp(A_log)": -rate.expand_as(step),
        "-exp(A_log) softplus(a + dt_bias)": -rate * torch.nn.functional.softplus(step),
        "-5 sigmoid(exp(A_log) (a + dt_bias))": -5 * torch.sigmoid(rate * step),
    }[mixer.log_decay]
    decay = torch.exp(log_decay)
    return decay[..., None, :] if mixer.decay is Decay.CHANNEL else decay[..., None, None]


def _write(r: Operands, layer: int, rows: slice) -> torch.Tensor:
    """Write gates [B, T, Hv]."""
    gate = r.case.shape.mixer.write_gate
    if gate == "softplus(a + dt_bias)":
        return torch.nn.functional.softplus(r.a[layer, rows].double() + r.dt_bias.double())
    write = torch.sigmoid(r.b[layer, rows].double())
    return {"1": torch.ones_like(write), "sigmoid(b)": write, "2 sigmoid(b)": 2 * write}[gate]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def committed_window(r: Operands, layer: int) -> torch.Tensor:
    """The committed windows after the path to the accepted nodes."""
    windows = []
    for row, node in enumerate(r.last.tolist()):
        path = []
        while node >= 0:
            path.append(node)
            node = r.parents[node]
        before = r.windows[layer, int(r.slots[row])]
        history = torch.cat([before, r.x[layer, row, path[::-1]].T], 1)
        windows.append(history[:, -before.shape[1] :])
    return torch.stack(windows)

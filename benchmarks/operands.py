# mypy: allow-untyped-calls
"""Operands of several layers for one case, drawn so that a rounding tie cannot decide a verdict.

Raw rows, windows and weights lie on coarse grids: the sums of a convolution are exact in
float32, and only SiLU rounds. Channels in which a convolved value lies too near the middle of
two numbers of the activations' dtype are drawn again.
"""

from dataclasses import dataclass

import torch

from benchmarks.cases import Case
from bolegen.ir import Decay, TreeTemplate

__all__ = [
    "CONV",
    "DTYPE",
    "STATES",
    "Operands",
    "Taps",
    "convolve",
    "draw_operands",
    "draw_rows",
    "split_rows",
]

CONV = 4
DTYPE = torch.bfloat16
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Taps = tuple[torch.Tensor, torch.Tensor | None]  # weight [C, W] and bias [C]

_NEAR_TIE = 5e-4  # of half a unit in the last place; SiLU in float32 errs by a third of it


@dataclass
class Operands:
    """Layer i of ``sets`` reads x[i], a[i], b[i], state[i], windows[i]; weights are shared.

    x, rows [sets, B, T, C] before and after the convolution, a, b [sets, B, T, Hv], weight
    [C, W], bias [C] or None, A_log, dt_bias, D [Hv], state [sets, slots, Hv, dv, dk], windows
    [sets, slots, C, W-1], slots [B], parents [T], last [B]: the accepted node of each request.
    With a decay per key channel a and dt_bias have an axis dk more. What the case's mixer does
    not read is drawn all the same, except that rows are x where it has no convolution.
    """

    case: Case
    x: torch.Tensor
    rows: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    D: torch.Tensor
    state: torch.Tensor
    windows: torch.Tensor
    slots: torch.Tensor
    parents: tuple[int, ...]
    last: torch.Tensor

    @property
    def sets(self) -> int:
        """Layers with memory of their own."""
        return self.x.shape[0]


def draw_operands(case: Case, sets: int, device: str, seed: int = 0) -> Operands:
    """Random operands of ``sets`` layers; the accepted node is one of the deepest."""
    gen = torch.Generator(device).manual_seed(seed)
    shape, batch, parents = case.shape, case.batch, case.parents
    hv, nodes = shape.value_heads, len(parents)
    channels = case.spec.channels
    wide = (shape.d_k,) if shape.mixer.decay is Decay.CHANNEL else ()

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen, device=device)

    def uniform(low: float, high: float, *size: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*size, generator=gen, device=device)

    state = torch.empty(sets, batch + 1, hv, shape.d_v, shape.d_k, device=device)
    state.normal_(0.0, 0.3, generator=gen)
    weight = _on_grid(0.5 * normal(channels, CONV), 64, 2)
    own = weight[:, -1]
    own[own == 0] = 1 / 64  # else the root's value would not change when its row is drawn again
    bias = _on_grid(0.5 * normal(channels), 64, 2) if shape.bias else None
    windows = _on_grid(normal(sets, batch + 1, channels, CONV - 1), 16, 4)
    slots = torch.randperm(batch + 1, generator=gen, device=device)[:batch]
    taps = (weight, bias) if shape.mixer.convolved else None
    drawn = [draw_rows(gen, windows[i, slots], taps, parents) for i in range(sets)]
    deepest = _deepest(parents)
    return Operands(
        case=case,
        x=torch.stack([x for x, _ in drawn]),
        rows=torch.stack([rows for _, rows in drawn]),
        a=normal(sets, batch, nodes, hv, *wide).to(DTYPE),
        b=normal(sets, batch, nodes, hv).to(DTYPE),
        weight=weight,
        bias=bias,
        A_log=uniform(-4.0, 1.5, hv),
        dt_bias=uniform(-4.0, 0.5, hv, *wide),
        D=uniform(0.5, 1.5, hv),
        state=state.to(STATES[case.state]),
        windows=windows,
        slots=slots.to(torch.int32),
        parents=parents,
        last=torch.tensor([deepest[row % len(deepest)] for row in range(batch)], device=device),
    )


def split_rows(case: Case, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [..., C] as views q, k [..., Hk, dk] and v [..., Hv, dv], in the mixer's order."""
    shape = case.shape
    keys = shape.key_heads * shape.d_k
    sizes = {"q": keys, "k": keys, "v": shape.value_heads * shape.d_v}
    cut = rows.split([sizes[part] for part in shape.mixer.row], -1)
    parts = dict(zip(shape.mixer.row, cut, strict=True))
    q, k = (parts[part].unflatten(-1, (-1, shape.d_k)) for part in "qk")
    return q, k, parts["v"].unflatten(-1, (-1, shape.d_v))


def convolve(
    x: torch.Tensor, windows: torch.Tensor, given: Taps, parents: tuple[int, ...]
) -> torch.Tensor:
    """Tree convolution and SiLU in float64: x [B, T, C], windows [B, C, W-1] -> [B, T, C]."""
    weight, bias = given
    history = torch.cat([windows.transpose(1, 2), x], 1).double()
    taps = torch.tensor(_taps(parents), device=x.device)
    out = torch.zeros_like(history[:, CONV - 1 :])
    if bias is not None:
        out += bias.double()
    for tap in range(CONV):
        out += history[:, taps[:, tap]] * weight[:, tap].double()
    return out * torch.sigmoid(out)


def _taps(parents: tuple[int, ...]) -> list[list[int]]:
    """Where in window and rows each node's own W rows lie, oldest first."""
    taps = []
    for node in range(len(parents)):
        path = [node]
        while len(path) < CONV:
            path.append(parents[path[-1]] if path[-1] > 0 else path[-1] - 1)
        taps.append([CONV - 1 + place for place in reversed(path)])
    return taps


def _deepest(parents: tuple[int, ...]) -> list[int]:
    tree = TreeTemplate.from_parents(parents)
    return [node for node, level in enumerate(tree.levels) if level == tree.depth]


def _on_grid(values: torch.Tensor, steps: int, limit: int) -> torch.Tensor:
    return ((values * steps).round() / steps).clamp(-limit, limit).to(DTYPE)


def draw_rows(
    gen: torch.Generator, windows: torch.Tensor, taps: Taps | None, parents: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw rows [B, T, C] and what the convolution makes of them, rounded once; without one
    (``taps`` None) the rows themselves.
    """
    size = (windows.shape[0], len(parents), windows.shape[1])
    again = torch.ones(size[0], 1, size[2], dtype=torch.bool, device=windows.device)
    x = torch.zeros(size, dtype=DTYPE, device=windows.device)
    while True:
        fresh = torch.randn(size, generator=gen, device=windows.device)
        x = torch.where(again, _on_grid(fresh, 16, 4), x)
        if taps is None:
            return x, x
        exact = convolve(x, windows, taps, parents)
        again = _near_tie(exact).any(dim=1, keepdim=True)
        if not again.any():
            return x, exact.to(DTYPE)


def _near_tie(exact: torch.Tensor) -> torch.Tensor:
    """Values within a sliver of the middle of two neighbours in the activations' dtype."""
    _, exponent = torch.frexp(exact)
    half = torch.ldexp(torch.full_like(exact, torch.finfo(DTYPE).eps / 4), exponent)
    return half - (exact - exact.to(DTYPE).double()).abs() < _NEAR_TIE * half

"""One round of an emitted module beside the float64 oracle, judged by the exactness contract."""

import importlib.util
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from bolegen import oracle
from bolegen.codegen import EmittedModule

__all__ = ["Round", "check_commit", "check_verify", "import_module", "make_round"]

LIMIT = 5e-6  # docs/theory.md, in norms over a head


def import_module(emitted: EmittedModule) -> ModuleType:
    """Import emitted text as a module of its own, from a file: Triton reads kernels' source."""
    folder = Path(tempfile.gettempdir()) / f"bolegen-tests-{emitted.digest}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{emitted.name}.py"
    path.write_text(emitted.text, "utf-8")
    spec = importlib.util.spec_from_file_location(f"bolegen_test_{emitted.digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Round:
    """Arguments of verify for `layers` layers; layer l reads x[l], a[l], ..., state[l]."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    conv_weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    conv_state: torch.Tensor
    slots: torch.Tensor
    conv_bias: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    live: torch.Tensor | None = None
    trees: list[list[int]] = field(default_factory=list)

    def verify(self, m: ModuleType, factors, layer: int = 0, **options) -> torch.Tensor:
        """Run the module's verify on one layer."""
        return m.verify(
            self.x[layer],
            self.a[layer],
            self.b[layer],
            self.conv_weight[layer],
            self.A_log[layer],
            self.dt_bias[layer],
            self.state[layer],
            self.conv_state[layer],
            self.slots,
            factors,
            layer=layer,
            conv_bias=None if self.conv_bias is None else self.conv_bias[layer],
            parents=self.parents,
            live=self.live,
            **options,
        )


def make_round(
    m: ModuleType,
    *,
    batch: int = 2,
    layers: int = 1,
    slots: int = 4,
    seed: int = 0,
    device: str = "cpu",
    nodes: int | None = None,
    trees: list[list[int]] | None = None,
    bias: bool = False,
    repeat: float = 0.0,
    log_rate: tuple[float, float] = (-4.0, 1.5),
    step: float = 1.0,
    write: float = 0.0,
) -> Round:
    """Random operands; `repeat` in 0..1 makes rows alike (collinear keys), `write` shifts beta."""
    module = m.MODULE
    gen = torch.Generator().manual_seed(seed)
    t = nodes or module.nodes
    hk, hv = module.heads
    dk, dv = module.dims
    c = 2 * hk * dk + hv * dv

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    x = normal(layers, batch, t, c)
    if repeat:
        x = repeat * normal(layers, batch, 1, c) + (1 - repeat) * x
    low, high = log_rate
    rate = low + (high - low) * torch.rand(layers, hv, generator=gen)
    window = normal(layers, slots, c, module.conv - 1)
    if trees is None:
        trees = [list(module.parents)] * batch if module.parents else None
    order = torch.randperm(slots, generator=gen)[:batch]
    made = Round(
        x=x.to(module.dtype),
        a=(step * normal(layers, batch, t, hv)).to(module.dtype),
        b=(write + normal(layers, batch, t, hv)).to(module.dtype),
        conv_weight=(0.5 * normal(layers, c, module.conv)).to(module.dtype),
        A_log=rate,
        dt_bias=normal(layers, hv),
        state=(0.3 * normal(layers, slots, hv, dv, dk)).to(module.state_dtype),
        conv_state=window.to(module.dtype),
        slots=order,
        conv_bias=normal(layers, c).to(module.dtype) if bias else None,
        parents=torch.tensor(trees) if module.parents is None else None,
        trees=trees or [],
    )
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor):
            setattr(made, name, value.to(device))
    return made


def numpy64(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as float64."""
    return tensor.detach().to("cpu", torch.float64).numpy()


@dataclass
class Worst:
    """Largest error over its limit, over all heads and rows of one check; at most 1 passes."""

    o: float = 0.0
    u: float = 0.0
    state: float = 0.0
    conv: float = 0.0

    def note(self, name: str, error: float, limit: float) -> None:
        """Remember error / limit where it is the largest so far; NaN is infinitely large."""
        ratio = error / limit if limit > 0 else (0.0 if error == 0 else np.inf)
        setattr(self, name, max(getattr(self, name), np.inf if np.isnan(ratio) else ratio))

    def assert_within(self) -> None:
        """Fail where any error is over its limit."""
        assert max(vars(self).values()) <= 1.0, f"error over limit: {self}"


def rounding(exact: np.ndarray, dtype: torch.dtype) -> float:
    """Norm of what one rounding of `exact` to `dtype` costs, times 1.1."""
    once = torch.from_numpy(exact).to(dtype).to(torch.float64).numpy()
    return 1.1 * float(np.linalg.norm(once - exact))


def operands(m: ModuleType, r: Round, factors, layer: int, row: int):
    """Oracle operands of one row, from the rows that the kernel itself rounded."""
    hk, hv = m.MODULE.heads
    nodes = r.x.shape[2]
    rows = numpy64(factors.qkv[row, :nodes])
    q, k, v = oracle.split_rows(rows, key_heads=hk, value_heads=hv, d_k=m.MODULE.dims[0])
    g, beta = oracle.gates(
        numpy64(r.a[layer, row]),
        numpy64(r.b[layer, row]),
        numpy64(r.A_log[layer]),
        numpy64(r.dt_bias[layer]),
    )
    return *oracle.normalise(q, k), v, g, beta


def check_conv(m: ModuleType, r: Round, factors, layer: int, row: int, worst: Worst) -> None:
    """The convolution by itself, to one unit in the last place of the activations' dtype."""
    slot = int(r.slots[row])
    live = None if r.live is None else r.live[row].cpu().numpy()
    bias = None if r.conv_bias is None else numpy64(r.conv_bias[layer])
    want = oracle.convolve(
        r.trees[row],
        numpy64(r.x[layer, row]),
        numpy64(r.conv_state[layer, slot]),
        numpy64(r.conv_weight[layer]),
        bias,
        live=live,
    )
    got = numpy64(factors.qkv[row, : len(want)])
    eps = torch.finfo(m.MODULE.dtype).eps
    # cancelling sums carry the float32 error of their terms, not of their result
    unit = np.abs(want) * eps * 1.01 + 4e-6
    worst.note("conv", float(np.max(np.abs(got - want) / unit)), 1.0)


def check_verify(m: ModuleType, r: Round, out: torch.Tensor, factors, layer: int = 0) -> Worst:
    """Outputs (and U where it is stored) of one layer against the oracle, head by head."""
    worst = Worst()
    for row in range(r.x.shape[1]):
        slot = int(r.slots[row])
        if slot < 0:
            assert torch.count_nonzero(out[row]) == 0
            continue
        check_conv(m, r, factors, layer, row, worst)
        live = None if r.live is None else r.live[row].cpu().numpy()
        q, k, v, g, beta = operands(m, r, factors, layer, row)
        state = numpy64(r.state[layer, slot])
        want = oracle.recurrence(r.trees[row], q, k, v, g, beta, state, live=live)
        got = numpy64(out[row])
        if live is not None:
            assert np.count_nonzero(got[~live]) == 0
        for head in range(got.shape[1]):
            exact = want.o[:, head]
            error = float(np.linalg.norm(got[:, head] - exact))
            limit = LIMIT * float(np.linalg.norm(exact))
            if m.MODULE.dtype != torch.float32:
                limit = max(rounding(exact, m.MODULE.dtype), limit)
            worst.note("o", error, limit)
        if factors.u is not None:
            check_u(m, r, factors, layer, row, want.u, (k, v, g, beta, state), worst)
    return worst


def check_u(m, r, factors, layer, row, want, known, worst) -> None:
    """|dU| <= 5e-6 (|D_beta V| + |D_beta D_P K S|) over a head: U itself may cancel."""
    k, v, g, beta, state = known
    got = numpy64(factors.u[layer, row, : len(want)])
    ratio = v.shape[1] // k.shape[1]
    sums = np.zeros_like(g)
    for node, parent in enumerate(r.trees[row]):
        sums[node] = g[node] + (sums[parent] if parent >= 0 else 0)
    for head in range(v.shape[1]):
        write = beta[:, head, None]
        part = write * np.exp(sums[:, head, None]) * (k[:, head // ratio] @ state[head].T)
        live = slice(None) if r.live is None else r.live[row].cpu().numpy()
        limit = LIMIT * float(
            np.linalg.norm((write * v[:, head])[live]) + np.linalg.norm(part[live])
        )
        error = float(np.linalg.norm((got[:, head] - want[:, head])[live]))
        worst.note("u", error, limit)


def check_commit(
    m: ModuleType,
    r: Round,
    factors,
    before: tuple[torch.Tensor, torch.Tensor],
    after: tuple[torch.Tensor, torch.Tensor],
    last: list[int],
    layer: int = 0,
) -> Worst:
    """Committed states and windows of one layer against the oracle; other slots untouched.

    Uses factors.qkv, so call it for the layer that was verified last.
    """
    worst = Worst()
    touched = set()
    for row, node in enumerate(last):
        slot = int(r.slots[row])
        live = None if r.live is None else r.live[row].cpu().numpy()
        if slot < 0 or not oracle.find_path(r.trees[row], node, live=live):
            continue
        touched.add(slot)
        _, k, v, g, beta = operands(m, r, factors, layer, row)
        state = numpy64(before[0][layer, slot])
        want = oracle.committed_state(r.trees[row], node, k, v, g, beta, state, live=live)
        got = numpy64(after[0][layer, slot])
        for head in range(len(want)):
            limit = LIMIT * float(np.linalg.norm(want[head]))
            if m.MODULE.state_dtype != torch.float32:
                limit = max(rounding(want[head], m.MODULE.state_dtype), limit)
            worst.note("state", float(np.linalg.norm(got[head] - want[head])), limit)
        window = oracle.committed_window(
            r.trees[row], node, numpy64(r.x[layer, row]), numpy64(before[1][layer, slot])
        )
        assert np.array_equal(numpy64(after[1][layer, slot]), window)
    for slot in set(range(before[0].shape[1])) - touched:
        assert torch.equal(after[0][layer, slot], before[0][layer, slot])
        assert torch.equal(after[1][layer, slot], before[1][layer, slot])
    return worst

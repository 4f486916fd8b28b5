"""One round of an emitted module: its operands, random or hostile, and the calls on them."""

import atexit
import importlib.util
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bolegen.codegen import EmittedModule, compile_template
from bolegen.ir import Decay, LayerSpec, Solver, find_mixer
from support.judge import Worst, check_commit, check_verify, same_bits

__all__ = [
    "Round",
    "Worst",
    "build",
    "check_commit",
    "check_verify",
    "import_module",
    "make_round",
    "play",
    "poison",
    "same_bits",
    "split",
]

# what the interpreter runs in about a second
SMALL: dict[str, Any] = {"key_heads": 1, "value_heads": 2, "d_k": 16, "d_v": 16}
# a folder of this process: another one may be writing the same module
_TEMPORARY = Path(tempfile.mkdtemp(prefix="bolegen-"))
atexit.register(shutil.rmtree, _TEMPORARY, ignore_errors=True)
# Hypothesis draws from constants of all modules that are loaded, unless they lie in "tests": what
# a worker happened to emit must not decide what it draws, and takes half a minute to parse
_FOLDER = _TEMPORARY / "tests"


def import_module(emitted: EmittedModule) -> ModuleType:
    """Import emitted text as a module of its own, from a file: Triton reads kernels' source."""
    name = f"bolegen_test_{emitted.digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = _FOLDER / emitted.digest / f"{emitted.name}.py"
    path.parent.mkdir(parents=True)
    path.write_text(emitted.text, "utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def build(
    template: str, *, depth: int | None = None, solver: Solver | None = None, **layer: Any
) -> ModuleType:
    """Compile and import a module, once a process; a layer is SMALL unless said otherwise."""
    if isinstance(layer.get("mixer"), str):
        layer["mixer"] = find_mixer(layer["mixer"])
    spec = LayerSpec(**(SMALL | layer))
    return import_module(compile_template(template, spec, depth=depth, solver=solver))


@dataclass
class Round:
    """Arguments of verify for `layers` layers; layer l reads x[l], a[l], ..., state[l].

    ``trees`` [B][T] are the parents that the judge uses, ``parents`` what the kernel is given.
    """

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
    D: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    live: torch.Tensor | None = None
    trees: list[list[int]] = field(default_factory=list)

    def with_clones(self, **changes: Any) -> "Round":
        """A round that shares no memory with this one."""
        copies = {k: v.clone() for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **(copies | changes))

    def verify(self, m: ModuleType, factors: Any, layer: int = 0, **options: Any) -> torch.Tensor:
        """Run the module's verify on one layer; what its mixer does not have is None."""
        weight, window, bias = (
            given[layer] if given is not None and find_mixer(m.MODULE.mixer).convolved else None
            for given in (self.conv_weight, self.conv_state, self.conv_bias)
        )
        a, b, *heads = self.gates(m, layer)
        out: torch.Tensor = m.verify(
            self.x[layer],
            a,
            b,
            weight,
            *heads,
            self.state[layer],
            window,
            self.slots,
            factors,
            layer=layer,
            **{"conv_bias": bias} | self.options(m, layer) | options,
        )
        return out

    def gates(self, m: ModuleType, layer: int) -> list[torch.Tensor | None]:
        """a, b, A_log and dt_bias of one layer, None for those that the mixer does not read."""
        known = find_mixer(m.MODULE.mixer).arguments
        names = "a", "b", "A_log", "dt_bias"
        return [getattr(self, name)[layer] if name in known else None for name in names]

    def options(self, m: ModuleType, layer: int) -> dict[str, Any]:
        """Topology and live nodes, and D where the mixer has a skip."""
        known = {"parents": self.parents, "live": self.live}
        if find_mixer(m.MODULE.mixer).skip:
            known["D"] = None if self.D is None else self.D[layer]
        return known

    def verify_qkv(
        self, m: ModuleType, factors: Any, layer: int = 0, **options: Any
    ) -> torch.Tensor:
        """Run the module's verify_qkv on one layer, x taken for rows that were convolved."""
        out: torch.Tensor = m.verify_qkv(
            *split(m, self.x[layer]),
            *self.gates(m, layer),
            self.state[layer],
            self.slots,
            factors,
            layer=layer,
            **self.options(m, layer) | options,
        )
        return out

    def commit(self, m: ModuleType, factors: Any, last: list[int], **options: Any) -> None:
        """Run the module's commit; without a convolution after verify_qkv."""
        nodes = torch.tensor(last, dtype=torch.int64, device=self.x.device)
        windows = None if factors.convolved else self.conv_state
        m.commit(factors, self.state, windows, self.slots, nodes, **options)


def split(m: ModuleType, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [..., C] as views q, k [..., Hk, dk] and v [..., Hv, dv], in the mixer's order."""
    (hk, hv), (dk, dv) = m.MODULE.heads, m.MODULE.dims
    sizes = {"q": hk * dk, "k": hk * dk, "v": hv * dv}
    order = find_mixer(m.MODULE.mixer).row
    *ends, _ = accumulate(sizes[part] for part in order)
    parts = dict(zip(order, x.tensor_split(ends, -1), strict=True))
    q, k = (parts[part].view(*x.shape[:-1], hk, dk) for part in "qk")
    return q, k, parts["v"].view(*x.shape[:-1], hv, dv)


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
    hk, hv = module.heads
    dk, dv = module.dims
    c = 2 * hk * dk + hv * dv
    channels = (dk,) if find_mixer(module.mixer).decay is Decay.CHANNEL else ()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    if trees is None:
        trees = [list(module.parents)] * batch
    t = nodes or len(trees[0])
    x = normal(layers, batch, t, c)
    if repeat:
        x = repeat * normal(layers, batch, 1, c) + (1 - repeat) * x
    low, high = log_rate
    rate = low + (high - low) * torch.rand(layers, hv, generator=gen)
    window = normal(layers, slots, c, module.conv - 1)
    made = Round(
        x=x.to(module.dtype),
        a=(step * normal(layers, batch, t, hv, *channels)).to(module.dtype),
        b=(write + normal(layers, batch, t, hv)).to(module.dtype),
        conv_weight=(0.5 * normal(layers, c, module.conv)).to(module.dtype),
        A_log=rate,
        dt_bias=normal(layers, hv, *channels),
        state=(0.3 * normal(layers, slots, hv, dv, dk)).to(module.state_dtype),
        conv_state=window.to(module.dtype),
        slots=torch.randperm(slots, generator=gen)[:batch],
        conv_bias=normal(layers, c).to(module.dtype) if bias else None,
        D=normal(layers, hv) if find_mixer(module.mixer).skip else None,
        parents=torch.tensor(trees) if module.parents is None else None,
        trees=trees,
    )
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor):
            setattr(made, name, value.to(device))
    return made


def poison(factors: Any) -> Any:
    """Fill all memory of a round with NaN and huge integers, as memory may come; returns it.

    `tree` is a constant, which allocate writes and nothing else.
    """
    for name, tensor in vars(factors).items():
        if isinstance(tensor, torch.Tensor) and name != "tree":
            wild = tensor.is_floating_point()
            tensor.fill_(float("nan") if wild else torch.iinfo(tensor.dtype).max)
    return factors


def play(m: ModuleType, r: Round, last: list[int], *, convolved: bool = False) -> Worst:
    """One round of layer 0 on poisoned memory, judged: verify reads only, commit writes once."""
    factors = poison(m.allocate(len(r.slots), 1, r.x.device))
    before = r.with_clones()
    out = r.verify_qkv(m, factors) if convolved else r.verify(m, factors)
    assert same_bits(r.state, before.state)
    assert same_bits(r.conv_state, before.conv_state)
    worst = check_verify(m, r, out, factors)
    r.commit(m, factors, last)
    committed = r.state, r.conv_state
    pool = before.state, before.conv_state
    return worst | check_commit(m, r, factors, pool, committed, last)

"""All memory of a round: what the emitted ``allocate`` spells and ``bolegen plan`` counts."""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from bolegen.codegen.cut import tiles_of
from bolegen.codegen.tables import keeps_tree
from bolegen.ir import Decay, TreePlan

__all__ = ["Buffer", "Element", "Lifetime", "decay_planes", "list_buffers", "spell_memory"]

_WIDTH = 95


class Element(NamedTuple):
    """A storage type as emitted text spells it, and its size."""

    dtype: str
    bytes: int


_FLOAT = Element("torch.float32", 4)
_INT = Element("torch.int32", 4)
_BF16 = Element("torch.bfloat16", 2)


class Lifetime(Enum):
    """ROUND: written by verify, read by commit, a layer each. SCRATCH: one layer's, reused."""

    ROUND = "round"
    SCRATCH = "scratch"


@dataclass(frozen=True)
class Buffer:
    """One tensor of Factors: [layers if ``per_layer``, batch if ``per_row``, *dims].

    ``least_rows``: room for so many rows whatever the batch; ``exists``: False for a field that
    this module leaves None; ``zeroed``: starts as zeros; ``holds``: the constant that it is.
    """

    name: str
    dims: tuple[int, ...]
    lifetime: Lifetime
    element: Element = _FLOAT
    per_layer: bool = False
    per_row: bool = True
    least_rows: int = 0
    exists: bool = True
    zeroed: bool = False
    holds: str = ""
    says: str = ""  # its axes, and what they hold

    def bytes(self, batch: int, layers: int) -> int:
        """What allocate(batch, layers) takes for it."""
        if not self.exists:
            return 0
        rows = max(batch, self.least_rows) if self.per_row else 1
        elements = rows * (layers if self.per_layer else 1)
        for size in self.dims:
            elements *= size
        return elements * self.element.bytes

    def row_bytes(self, layers: int) -> int:
        """What one more request takes of it."""
        return self.bytes(self.least_rows + 1, layers) - self.bytes(self.least_rows, layers)

    def spell(self) -> str:
        """The expression that allocates it: empty(layers, batch, 43, 8192, dtype=...)."""
        if not self.exists:
            return "None"
        rows = f"max(batch, {self.least_rows})" if self.least_rows else "batch"
        axes = ["layers"] * self.per_layer + [rows] * self.per_row
        shape = ", ".join([*axes, *map(str, self.dims)])
        if self.holds:
            return f"torch.tensor({self.holds}, dtype={self.element.dtype}, device=device)"
        if self.zeroed:
            return f"torch.zeros({shape}, dtype={self.element.dtype}, device=device)"
        kind = "" if self.element == _FLOAT else f", dtype={self.element.dtype}"
        return f"empty({shape}{kind})"


def list_buffers(plan: TreePlan) -> tuple[Buffer, ...]:
    """Every tensor of the emitted Factors, in order: until acceptance, then scratch."""
    return _round_buffers(plan) + _scratch_buffers(plan)


def _round_buffers(plan: TreePlan) -> tuple[Buffer, ...]:
    spec, nodes = plan.spec, plan.tree.nodes
    mixer, replay, x = spec.mixer, spec.factors == "replay", _rows_of(plan)
    constant, channel = mixer.decay is Decay.CONSTANT, mixer.decay is Decay.CHANNEL
    of = partial(Buffer, lifetime=Lifetime.ROUND)
    wide = (spec.gates, spec.value_heads) if spec.gates > 1 else (spec.value_heads,)
    axes = f"[L, B, T{', 2' if spec.gates > 1 else ''}, Hv]"
    return (
        of("rows", dims=(nodes, spec.channels), element=x, per_layer=True, exists=spec.keeps_rows,
           says="[L, B, T, C]: what verify was given"),
        of("window_keys", dims=(spec.conv - 1, spec.key_heads, spec.d_k), element=x,
           per_layer=True, exists=replay and mixer.convolved,
           says="[L, B, W-1, Hk, dk]: k's part of the committed window"),
        of("kept", dims=(spec.conv + 1, spec.channels), element=x, per_layer=True, per_row=False,
           exists=replay and mixer.convolved,
           says="[L, W+1, C]: convolution weights and bias"),
        of("gates", dims=(nodes, *wide), per_layer=True, exists=spec.gates > 0,
           says=f"{axes} float32: {' and '.join(_gate_names(plan))}"),
        *[of("rates", dims=(spec.value_heads,), per_layer=True, per_row=False,
             says="[L, Hv] float32: log decay of every node")] * constant,
        *[of("rates", dims=(nodes, spec.value_heads, spec.d_k), per_layer=True,
             says="[L, B, T, Hv, dk] float32: decays")] * channel,
        of("keys", dims=(nodes, spec.key_heads, spec.d_k), per_layer=True, exists=not replay,
           says="[L, B, T, Hk, dk] float32"),
        of("u", dims=(nodes, spec.value_heads, spec.d_v), per_layer=True, exists=not replay,
           says="[L, B, T, Hv, dv] float32"),
        of("live", dims=(nodes,), element=Element("torch.int8", 1), zeroed=True,
           says="[B, T] int8"),
        of("parents", dims=(nodes,), element=_INT, exists=not plan.tree.is_static,
           says="[B, T] int32"),
    )  # fmt: skip


def _scratch_buffers(plan: TreePlan) -> tuple[Buffer, ...]:
    spec, tiling, terms = plan.spec, plan.tiling, plan.precision.readout_terms
    mixer, replay, x = spec.mixer, spec.factors == "replay", _rows_of(plan)
    nodes, rows, columns = plan.tree.nodes, plan.rows, plan.column_count
    heads, y = spec.value_heads, _BF16 if terms else _FLOAT
    # where solve is merged with factor, each value tile has its own products
    merged = tiling.merge_batch * tiles_of(spec.d_v, tiling.b_v)
    planes = decay_planes(plan)
    blocks = ", then its blocks' inverses" if any(b.inverted for b in plan.columns) else ""
    how = ("float32", "in bf16", "in two bf16 terms")[min(terms, 2)]
    of = partial(Buffer, lifetime=Lifetime.SCRATCH)
    return (
        of("qkv", dims=(nodes, spec.channels), element=x, exists=mixer.convolved or not replay,
           says=f"[B, T, C]: rows{' after the convolution' * mixer.convolved}"),
        of("window_rows", dims=(spec.conv - 1, spec.channels), element=x,
           exists=mixer.convolved, says="[B, W-1, C]: the committed window, as rows"),
        of("vectors", dims=(2, spec.key_heads, nodes), exists=mixer.unit_keys,
           says="[B, 2, Hk, T] float32: scale/|q| and 1/|k|"),
        of("decays", dims=(len(planes), heads, nodes), exists=bool(planes),
           says=f"[B, {len(planes)}, Hv, T] float32: {_spell_planes(plan)}"),
        of("products", dims=(heads, columns, columns), least_rows=merged, exists=mixer.delta,
           says=f"[B, Hv, COLUMNS, COLUMNS] float32: -G{blocks}"),
        of("readout", dims=(heads, max(terms, 1), rows, columns), element=y,
           says=f"[B, Hv, {max(terms, 1)}, ROWS, COLUMNS]: Y {how}") if mixer.delta else
        of("readout", dims=(spec.key_heads, rows, columns),
           says="[B, Hk, ROWS, COLUMNS] float32: q_i.k_j"),
        of("inverse", dims=(heads, rows, columns), exists=mixer.delta and not replay,
           says="[B, Hv, ROWS, COLUMNS] float32: Z"),
        of("scales", dims=(heads, 4, rows), says="[B, Hv, 4, ROWS] float32"),
        *[of("reach", dims=(heads, plan.reach_terms, nodes, 2, spec.d_k),
             element=_BF16 if plan.reach_terms > 1 else _FLOAT,
             says=f"[B, Hv, {plan.reach_terms}, T, 2, dk]: P o K, P o Q "
             + ("float32", "in two bf16 terms")[plan.reach_terms - 1])]
        * (mixer.decay is Decay.CHANNEL),
        *[of("tree", dims=(4, nodes), per_row=False, element=_INT, holds="TREE",
             says="[4, T] int32: TREE, which no kernel writes")] * keeps_tree(plan),
        of("ancestors", dims=(tiles_of(nodes, 32), nodes), element=_INT,
           exists=not plan.tree.is_static, says="[B, T/32, T] int32: a bit a node"),
    )  # fmt: skip


def decay_planes(plan: TreePlan) -> tuple[str, ...]:
    """What scratch keeps of each node and value head: log P in two floats, the write gate."""
    mixer = plan.spec.mixer
    sums = ("hi", "lo") if mixer.scales_state else ()
    return sums if mixer.write_gate == "1" else (*sums, "beta")


def _spell_planes(plan: TreePlan) -> str:
    planes = decay_planes(plan)
    said = ["log P in two floats"] * ("hi" in planes) + ["write gate"] * ("beta" in planes)
    return ", ".join(said)


def _gate_names(plan: TreePlan) -> tuple[str, ...]:
    log_decay = ("log decay",) if plan.spec.mixer.decay is Decay.SCALAR else ()
    return (*log_decay, "write gate")[: plan.spec.gates]


def _rows_of(plan: TreePlan) -> Element:
    return Element("MODULE.dtype", plan.spec.dtype.bytes)


def spell_memory(plan: TreePlan) -> dict[str, object]:
    """What the template of Factors and allocate spells."""
    buffers = list_buffers(plan)
    there = [b for b in buffers if b.exists]
    by = {kind: [b for b in there if b.lifetime is kind] for kind in Lifetime}
    kept, scratch = by[Lifetime.ROUND], by[Lifetime.SCRATCH]
    return {
        "buffers": [
            {"name": b.name, "made": b.spell(), "least": b.least_rows, "exists": b.exists}
            for b in buffers
        ],
        "round_buffers": [f"{b.name} {b.says}" for b in kept],
        "scratch_buffers": [f"{b.name} {b.says}" for b in scratch],
        "layered": next(b.name for b in kept if b.per_layer and b.per_row),
        "round_lines": _spell_names("kept", [f"self.{b.name}" for b in kept]),
        "scratch_lines": _spell_names("scratch", [f"self.{b.name}" for b in scratch]),
    }


def _spell_names(target: str, names: list[str]) -> list[str]:
    """target = (a, b, ...), in as many statements as the line width asks for."""
    lines, items = [], names[:1]
    for name in [*names[1:], ""]:
        line = f"{target} = ({', '.join([*items, name])})"
        if name and len(line) + 8 <= _WIDTH:
            items.append(name)
            continue
        lines.append(f"{target} = ({', '.join(items)})")
        items = [f"*{target}", name]
    return lines

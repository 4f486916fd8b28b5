"""All memory of a round: what the emitted ``allocate`` spells and ``bolegen plan`` counts."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from bolegen.codegen.cut import tiles_of
from bolegen.ir import TreePlan

__all__ = ["Buffer", "Element", "Lifetime", "list_buffers", "spell_memory"]

_WIDTH = 95


class Element(NamedTuple):
    """A storage type as emitted text spells it, and its size."""

    dtype: str
    bytes: int


_FLOAT = Element("torch.float32", 4)
_INT = Element("torch.int32", 4)


class Lifetime(Enum):
    """ROUND: written by verify, read by commit, a layer each. SCRATCH: one layer's, reused."""

    ROUND = "round"
    SCRATCH = "scratch"


@dataclass(frozen=True)
class Buffer:
    """One tensor of Factors: [layers if ``per_layer``, batch if ``per_row``, *dims].

    ``least_rows``: room for so many rows whatever the batch; ``exists``: False for a field that
    this module leaves None; ``zeroed``: starts as zeros.
    """

    name: str
    lifetime: Lifetime
    dims: tuple[int, ...]
    element: Element = _FLOAT
    per_layer: bool = False
    per_row: bool = True
    least_rows: int = 0
    exists: bool = True
    zeroed: bool = False

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
        if self.zeroed:
            return f"torch.zeros({shape}, dtype={self.element.dtype}, device=device)"
        kind = "" if self.element == _FLOAT else f", dtype={self.element.dtype}"
        return f"empty({shape}{kind})"


def list_buffers(plan: TreePlan) -> tuple[Buffer, ...]:
    """Every tensor of the emitted Factors, in order; its docstring says what each holds."""
    spec, tiling, terms = plan.spec, plan.tiling, plan.precision.readout_terms
    replay, runtime = spec.factors == "replay", not plan.tree.is_static
    nodes, rows, columns = plan.tree.nodes, plan.rows, plan.column_count
    heads, keys, c = spec.value_heads, spec.key_heads, spec.channels
    x = Element("MODULE.dtype", spec.dtype.bytes)
    y = Element("torch.bfloat16", 2) if terms else _FLOAT
    gates = (nodes, 2, heads) if replay else (nodes, heads)
    # where solve is merged with factor, each value tile has its own products
    merged = tiling.merge_batch * tiles_of(spec.d_v, tiling.b_v)
    of, round_, scratch = Buffer, Lifetime.ROUND, Lifetime.SCRATCH
    return (
        of("rows", round_, (nodes + spec.conv - 1, c), x, per_layer=True),
        of("kept", round_, (spec.conv + 1, c), x, per_layer=True, per_row=False, exists=replay),
        of("gates", round_, gates, per_layer=True),
        of("keys", round_, (nodes, keys, spec.d_k), per_layer=True, exists=not replay),
        of("u", round_, (nodes, heads, spec.d_v), per_layer=True, exists=not replay),
        of("live", round_, (nodes,), Element("torch.int8", 1), zeroed=True),
        of("parents", round_, (nodes,), _INT, exists=runtime),
        of("qkv", scratch, (nodes + spec.conv - 1, c), x),
        of("vectors", scratch, (2, keys, nodes)),
        of("decays", scratch, (3, heads, nodes)),
        of("products", scratch, (heads, columns, columns), least_rows=merged),
        of("readout", scratch, (heads, max(terms, 1), rows, columns), y),
        of("inverse", scratch, (heads, rows, columns), exists=not replay),
        of("scales", scratch, (heads, 4, rows)),
        of("ancestors", scratch, (tiles_of(nodes, 32), nodes), _INT, exists=runtime),
    )


def spell_memory(plan: TreePlan) -> dict[str, object]:
    """What the template of Factors and allocate spells."""
    buffers = list_buffers(plan)
    by = {
        lifetime: [f"self.{b.name}" for b in buffers if b.lifetime is lifetime]
        for lifetime in Lifetime
    }
    return {
        "buffers": [{"name": b.name, "made": b.spell(), "least": b.least_rows} for b in buffers],
        "round_lines": _spell_names("kept", by[Lifetime.ROUND]),
        "scratch_lines": _spell_names("scratch", by[Lifetime.SCRATCH]),
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

"""What part of a target pass its linear layers' cores take, by nodes of a request."""

from typing import Any

from benchmarks.engine.kernels import share_of
from benchmarks.engine.records import count_nodes

__all__ = ["SHARES", "list_shares"]

SHARES = [
    "layers", "nodes", "context", "batch", "cores, us: SGLang", "bolegen", "pass, us: SGLang",
    "bolegen", "cores' share, %: SGLang", "bolegen",
]  # fmt: skip
Record = dict[str, Any]


def list_shares(records: list[Record]) -> list[list[str]]:
    """Rows under SHARES by context, batch and nodes; a chain and plain decoding have no ours."""
    found: dict[tuple[int, ...], dict[bool, tuple[float, float]]] = {}
    for record in records:
        for kept in record.get("passes", []):
            batch = kept["batch"]
            key = kept["context"], batch, record["model"]["layers"], count_nodes(record, batch)
            found.setdefault(key, {})[record["plugin"]] = share_of(kept)
    rows = []
    for (context, batch, layers, nodes), shares in sorted(found.items()):
        sides = [_spell(shares.get(plugin)) for plugin in (False, True)]
        cells = [cell for pair in zip(*sides, strict=True) for cell in pair]
        rows.append([str(layers), str(nodes), str(context), str(batch), *cells])
    return rows


def _spell(side: tuple[float, float] | None) -> list[str]:
    if side is None:
        return ["-"] * 3
    cores, whole = side
    return [f"{cores:.0f}", f"{whole:.0f}", f"{100 * cores / whole:.1f}"]

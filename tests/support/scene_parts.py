"""What scenes are made of: one small module, a round's operands, and factors after its verify."""
# mypy: disable-error-code="no-untyped-call"

from functools import cache
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime import LayerWeights
from support.rounds import Round, build, make_round
from support.spoils import Arguments

__all__ = [
    "LAST",
    "LAYERS",
    "LINKS",
    "NODES",
    "ROWS",
    "gates",
    "ints",
    "module",
    "operands",
    "tracks",
    "tree",
    "verified",
    "weights_of",
]

ROWS, NODES, LAYERS, SLOTS = 2, 3, 1, 3
LINKS = [[1, -1, -1], [1, 2, -1]], [[-1, 2, -1], [-1, -1, -1]]
LAST = [1, 2]


@cache
def module() -> ModuleType:
    return build("any:4", depth=2, key_heads=1, value_heads=1, d_k=16, d_v=16, conv=2)


def operands(device: str) -> Round:
    trees = [[-1, 0, 0], [-1, 0, 1]]
    r = make_round(module(), trees=trees, slots=SLOTS, layers=LAYERS, bias=True, device=device)
    r.live = torch.tensor([[True, True, True], [True, True, False]], device=device)
    return r


@cache
def verified(device: str) -> Any:
    """Factors after verify; all else in them is zeros."""
    factors = module().allocate(ROWS, LAYERS, device)
    for tensor in vars(factors).values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    operands(device).verify(module(), factors)
    return factors


def ints(values: Any, device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def tracks(device: str) -> Arguments:
    none, root = ints([-1, -1], device=device), ints([0, 0], device=device)
    return {"track_slots": none, "track_node": root}


def weights_of(r: Round) -> list[LayerWeights]:
    assert r.conv_bias is not None
    return [LayerWeights(r.conv_weight[0], r.A_log[0], r.dt_bias[0], r.conv_bias[0])]


def gates(r: Round) -> Arguments:
    return {"a": r.a[0], "b": r.b[0], "A_log": r.A_log[0], "dt_bias": r.dt_bias[0]}


def tree(r: Round) -> Arguments:
    out = torch.zeros(ROWS, NODES, 1, 16, dtype=r.x.dtype, device=r.x.device)
    return {"slots": r.slots, "parents": r.parents, "live": r.live, "out": out}

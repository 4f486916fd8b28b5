"""Shapes of a server's GDN layers on one rank, as the engine's state parameters have them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime.loader import DTYPES, load
from bolegen_runtime.sglang.errors import PluginError
from bolegen_runtime.sglang.flags import TreeBounds

__all__ = ["RoundSpec", "read_spec"]

_SPELLED = {getattr(torch, name): short for short, name in DTYPES.items()}


@dataclass(frozen=True)
class RoundSpec:
    """Everything that decides the module of a server and the size of its rounds.

    heads (Hk, Hv) and layers are this rank's, dims (d_k, d_v).
    """

    bounds: TreeBounds
    layers: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    conv: int
    dtype: str
    state_dtype: str

    def load_module(self) -> ModuleType:
        """The module for trees given at run time, or of a chain: cached, or compiled."""
        nodes = self.bounds.nodes
        return load(
            f"chain:{nodes - 1}" if self.bounds.chain else f"any:{nodes}",
            depth=self.bounds.depth,
            heads=self.heads,
            dims=self.dims,
            conv=self.conv,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
        )

    def snapshot_bytes(self) -> int:
        """What SGLang keeps of a request in all layers: a state and a convolution window a node;
        the windows of a chain overlap.
        """
        (key_heads, value_heads), (d_k, d_v) = self.heads, self.dims
        nodes, taps = self.bounds.nodes, self.conv - 1
        columns = nodes + taps - 1 if self.bounds.chain else nodes * taps
        size = {"bf16": 2, "fp16": 2, "fp32": 4}
        windows = columns * (2 * key_heads * d_k + value_heads * d_v) * size[self.dtype]
        states = nodes * value_heads * d_v * d_k * size[self.state_dtype]
        return self.layers * (states + windows)


def read_spec(bounds: TreeBounds, params: Any, layers: int, dtype: torch.dtype) -> RoundSpec:
    """Shapes from SGLang's cache parameters (``shape.conv``, ``shape.temporal``, ``dtype``).

    ``dtype``: of the model's activations. Raises PluginError where they are not a GDN layer's.
    """
    if len(params.shape.conv) != 1 or len(params.shape.temporal) != 3:
        raise PluginError(
            f"state shapes: expected one convolution and [Hv, d_v, d_k], got {params.shape.conv} "
            f"and {params.shape.temporal}; the model's mixers are not GDN"
        )
    channels, window = params.shape.conv[0]
    value_heads, d_v, d_k = params.shape.temporal
    key_heads, rest = divmod(channels - value_heads * d_v, 2 * d_k)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise PluginError(
            f"state shapes: {channels} channels are no q|k|v of {value_heads} value heads of "
            f"{d_k}:{d_v}; the model's mixers are not GDN"
        )
    kept, state = params.dtype.conv, params.dtype.temporal
    if kept != dtype or dtype not in _SPELLED:
        raise PluginError(
            f"--dtype is {dtype} and convolution states are {kept}: the plugin needs them equal; "
            "set SGLANG_MAMBA_CONV_DTYPE to the model's dtype"
        )
    if state not in (torch.float32, torch.bfloat16):
        raise PluginError(f"--mamba-ssm-dtype: expected float32 or bfloat16, got {state}")
    return RoundSpec(
        bounds, layers, (key_heads, value_heads), (d_k, d_v), window + 1,
        _SPELLED[dtype], _SPELLED[state],
    )  # fmt: skip

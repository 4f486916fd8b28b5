"""Memory of one round at fixed addresses: what is verified, what it gives, what commit needs.

The committed state is not here, it is the engine's; scratch of one layer is inside the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

__all__ = ["RoundBuffers"]

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class RoundBuffers:
    """Arguments and results of verify for up to B rows of T nodes in L layers.

    x [L, B, T, C], a and b [L, B, T, Hv], slots [B] int64, parents [B, T] int32 (None: compiled
    in), live [B, T] bool, last_node [B] int64, out [L, B, T, Hv, d_v]; factors: the module's.
    """

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slots: torch.Tensor
    parents: torch.Tensor | None
    live: torch.Tensor
    last_node: torch.Tensor
    out: torch.Tensor
    factors: Any

    @classmethod
    def allocate(
        cls,
        module: ModuleType,
        batch: int,
        layers: int,
        device: torch.device,
        *,
        gate_dtype: torch.dtype | None = None,
    ) -> RoundBuffers:
        """Buffers of padded rows. ``gate_dtype``, of a and b: the module's own, or float32."""
        m = module.MODULE
        (key_heads, value_heads), (d_k, d_v) = m.heads, m.dims
        channels = 2 * key_heads * d_k + value_heads * d_v

        def zeros(*shape: int, dtype: torch.dtype = m.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        gates = (layers, batch, m.nodes, value_heads)
        return cls(
            x=zeros(layers, batch, m.nodes, channels),
            a=zeros(*gates, dtype=gate_dtype or m.dtype),
            b=zeros(*gates, dtype=gate_dtype or m.dtype),
            slots=zeros(batch, dtype=torch.int64).fill_(-1),
            parents=None if m.parents else zeros(batch, m.nodes, dtype=torch.int32),
            live=zeros(batch, m.nodes, dtype=torch.bool),
            last_node=zeros(batch, dtype=torch.int64).fill_(-1),
            out=zeros(*gates, d_v),
            factors=module.allocate(batch, layers, device),
        )

    def fill(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        slots: torch.Tensor,
        *,
        parents: torch.Tensor | None = None,
        live: torch.Tensor | None = None,
    ) -> None:
        """Copy one round in, and pad it: other rows have slot -1, other nodes are dead.

        x [L, rows, n, C], a and b [L, rows, n, Hv], slots [rows], parents and live [rows, n], all
        on the buffers' device. Allocates nothing. Raises ValueError, before anything is copied,
        for a shape, dtype or device; contents are not looked at, which would wait for the device.
        """
        rows, n = self._size_of(x)
        if (parents is None) != (self.parents is None):
            have = "None, the topology is compiled in" if self.parents is None else "a tensor"
            raise ValueError(f"parents: expected {have}")
        given = [("x", x, self.x[:, :rows, :n]), ("a", a, self.a[:, :rows, :n])]
        given += [("b", b, self.b[:, :rows, :n]), ("slots", slots, self.slots[:rows])]
        for name, tensor, buffer in (
            ("live", live, self.live),
            ("parents", parents, self.parents),
        ):
            if tensor is not None and buffer is not None:
                given.append((name, tensor, buffer[:rows, :n]))
        for name, tensor, place in given:
            _expect_like(name, tensor, place)
        # an argument may be the buffer itself: only what is not given is overwritten
        self.slots[rows:].fill_(-1)
        self.live[:rows, n:].fill_(False)
        if live is None:
            self.live[:rows, :n].fill_(True)
        for _, tensor, place in given:
            place.copy_(tensor)

    def fill_last(self, last_node: torch.Tensor, rows: int) -> None:
        """Copy last_node [rows] in; other rows commit nothing. Raises ValueError as fill()."""
        place = self.last_node[:rows]
        _expect_like("last_node", last_node, place)
        self.last_node[rows:].fill_(-1)
        place.copy_(last_node)

    def _size_of(self, x: torch.Tensor) -> tuple[int, int]:
        """Rows and nodes of a round."""
        if x.dim() != 4:
            raise ValueError(f"x: expected four axes [L, rows, n, C], got {tuple(x.shape)}")
        rows, n = x.shape[1:3]
        if rows > self.slots.shape[0] or not 1 <= n <= self.live.shape[1]:
            raise ValueError(
                f"x: expected at most {self.slots.shape[0]} rows of 1 to {self.live.shape[1]} "
                f"nodes, got {rows} of {n}"
            )
        return rows, n


def _expect_like(name: str, tensor: torch.Tensor, place: torch.Tensor) -> None:
    """An argument has the shape, dtype and device of its place; integers may differ in width."""
    if tensor.shape != place.shape:
        raise ValueError(f"{name}: expected shape {tuple(place.shape)}, got {tuple(tensor.shape)}")
    have = _INTEGERS if place.dtype in _INTEGERS else (place.dtype,)
    if tensor.dtype not in have:
        raise ValueError(f"{name}: expected {' or '.join(map(str, have))}, got {tensor.dtype}")
    if tensor.device != place.device:
        raise ValueError(f"{name}: expected device {place.device}, got {tensor.device}")

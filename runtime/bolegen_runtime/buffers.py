"""Memory of one round at fixed addresses: what is verified, what it gives, what commit needs.

The committed state is not here, it is the engine's; scratch of one layer is inside the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime.arguments import INTEGERS, expect_module, expect_tensor
from bolegen_runtime.topology import trace_links, trace_parents

__all__ = ["RoundBuffers"]


@dataclass(frozen=True)
class RoundBuffers:
    """Arguments and results of verify for up to B rows of T nodes in L layers.

    x [L, B, T, C], a and b [L, B, T, Hv] (a of a decay by channel [L, B, T, Hv, d_k]; None: the
    mixer has none), slots [B] int64, parents [B, T] int32 (None: compiled
    in), live and counted [B, T] bool, order [T] (0, 1, ...), last_node [B] int64,
    out [L, B, T, Hv, d_v]; factors: the module's.
    """

    x: torch.Tensor
    a: torch.Tensor | None
    b: torch.Tensor | None
    slots: torch.Tensor
    parents: torch.Tensor | None
    live: torch.Tensor
    counted: torch.Tensor
    order: torch.Tensor
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
        """Buffers of padded rows. ``gate_dtype``, of a and b: the module's own, or float32.

        Raises ValueError, which names the argument.
        """
        expect_module(module)
        m, factors = module.MODULE, module.allocate(batch, layers, device)
        if gate_dtype not in (None, m.dtype, torch.float32):
            raise ValueError(
                f"gate_dtype: expected {m.dtype} or torch.float32, got {gate_dtype!r:.40}"
            )
        (key_heads, value_heads), (d_k, d_v) = m.heads, m.dims
        channels = 2 * key_heads * d_k + value_heads * d_v

        def zeros(*shape: int, dtype: torch.dtype = m.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        nodes, gate = (layers, batch, m.nodes), gate_dtype or m.dtype
        a, b = (
            None if dims is None else zeros(*nodes, *dims, dtype=gate)
            for dims in (m.a_dims, m.b_dims)
        )
        return cls(
            x=zeros(*nodes, channels),
            a=a,
            b=b,
            slots=zeros(batch, dtype=torch.int64).fill_(-1),
            parents=None if m.parents else zeros(batch, m.nodes, dtype=torch.int32),
            live=zeros(batch, m.nodes, dtype=torch.bool),
            counted=zeros(batch, m.nodes, dtype=torch.bool),
            order=torch.arange(m.nodes, device=device),
            last_node=zeros(batch, dtype=torch.int64).fill_(-1),
            out=zeros(*nodes, value_heads, d_v),
            factors=factors,
        )

    def fill(
        self,
        x: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        slots: torch.Tensor,
        *,
        parents: torch.Tensor | None = None,
        links: tuple[torch.Tensor, torch.Tensor] | None = None,
        live: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Copy one round in, and pad it: other rows have slot -1, other nodes are dead.

        x [L, rows, n, C], a and b [L, rows, n, Hv], slots [rows]; parents [rows, n] or links, the
        first children and next siblings [rows, n], where the topology is not compiled in; live
        [rows, n]; counts [rows], the nodes of each row. All on the buffers' device. Allocates
        nothing. Raises ValueError, before anything is copied, for a shape, dtype or device;
        contents are not looked at, which would wait for the device: see trace_links.
        """
        rows, n = self._size_of(x)
        self._check_tree(parents, links, (rows, n))
        keep = self.live[:rows, :n]
        given: list[tuple[str, Any, torch.Tensor]] = [("x", x, self.x[:, :rows, :n])]
        for name, tensor, buffer in (("a", a, self.a), ("b", b, self.b)):
            if buffer is not None:
                given.append((name, tensor, buffer[:, :rows, :n]))
            elif tensor is not None:
                raise ValueError(f"{name}: expected None, the mixer has no {name}")
        given.append(("slots", slots, self.slots[:rows]))
        if live is not None:
            given.append(("live", live, keep))
        for name, tensor, place in given:
            _expect_like(name, tensor, place)
        if counts is not None:
            _expect_like("counts", counts, self.slots[:rows])
        # an argument may be the buffer itself: only what is not given is overwritten
        self.slots[rows:].fill_(-1)
        self.live[:rows, n:].fill_(False)
        if live is None:
            keep.fill_(True)
        for _, tensor, place in given:
            place.copy_(tensor)
        if counts is not None:
            counted = self.counted[:rows, :n]
            torch.lt(self.order[:n], counts[:, None], out=counted)
            keep.logical_and_(counted)
        if self.parents is None:
            return
        whole = self.slots[:rows], self.parents[:rows], self.live[:rows]
        if links is not None:
            trace_links(*links, *whole, keep=keep)
        elif parents is not None:
            trace_parents(parents, *whole, keep=keep)

    def _check_tree(
        self,
        parents: torch.Tensor | None,
        links: tuple[torch.Tensor, torch.Tensor] | None,
        shape: tuple[int, int],
    ) -> None:
        """Exactly one topology where none is compiled in."""
        if self.parents is None:
            if parents is not None or links is not None:
                name = "links" if parents is None else "parents"
                raise ValueError(f"{name}: expected None, the topology is compiled in")
            return
        if (parents is None) == (links is None):
            have = "neither" if links is None else "both"
            raise ValueError(f"parents, links: expected one of them, got {have}")
        place = self.parents[: shape[0], : shape[1]]
        if links is None:
            _expect_like("parents", parents, place)
            return
        if not isinstance(links, tuple) or len(links) != 2:
            raise ValueError("links: expected a pair of tensors (first_child, next_sibling)")
        for name, tensor in zip(("first_child", "next_sibling"), links, strict=True):
            _expect_like(name, tensor, place)
        if links[0].dtype != links[1].dtype:
            raise ValueError(f"next_sibling: expected {links[0].dtype}, got {links[1].dtype}")

    def prewarm(self) -> None:
        """Compile what fill may launch, by rounds of padded rows; what was in here is dropped."""
        if self.parents is None:
            return
        self.slots.fill_(-1)
        whole = self.slots, self.parents, self.live
        for dtype in INTEGERS:
            tree = torch.zeros_like(self.parents, dtype=dtype)
            trace_parents(tree, *whole, keep=self.live)
            trace_links(tree, tree, *whole, keep=self.live)

    def fill_last(self, last_node: torch.Tensor, rows: int) -> None:
        """Copy last_node [rows] in; other rows commit nothing. Raises ValueError as fill()."""
        place = self.last_node[:rows]
        _expect_like("last_node", last_node, place)
        self.last_node[rows:].fill_(-1)
        place.copy_(last_node)

    def _size_of(self, x: torch.Tensor) -> tuple[int, int]:
        """Rows and nodes of a round."""
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            have = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"x: expected four axes [L, rows, n, C], got {have}")
        rows, n = x.shape[1:3]
        if rows > self.slots.shape[0] or not 1 <= n <= self.live.shape[1]:
            raise ValueError(
                f"x: expected at most {self.slots.shape[0]} rows of 1 to {self.live.shape[1]} "
                f"nodes, got {rows} of {n}"
            )
        return rows, n


def _expect_like(name: str, tensor: object, place: torch.Tensor) -> None:
    """An argument has the shape, dtype and device of its place; integers may differ in width."""
    have = INTEGERS if place.dtype in INTEGERS else (place.dtype,)
    expect_tensor(name, tensor, tuple(place.shape), have, place.device)
    assert isinstance(tensor, torch.Tensor)
    held = tensor.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
    if held and tensor.numel() and tensor.data_ptr() != place.data_ptr():
        raise ValueError(
            f"{name}: expected its own place in the buffers, or none, got another part"
        )

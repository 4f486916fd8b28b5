# mypy: allow-untyped-calls
"""SGLang's verifiers of trees for other mixers, called as its server calls them: node by node."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.operands import Operands, split_rows
from benchmarks.peers.calls import Serial, load
from benchmarks.reference import Exact
from bolegen.ir import KDA, KDA_BOUNDED, MAMBA2

__all__ = ["SERIAL", "SerialChannels", "SerialScan"]


class SerialChannels(Serial):
    """KDA: the kernel of Gated DeltaNet with a gate a key channel, on windows of whole rows."""

    def gates(self, i: int) -> dict[str, Any]:
        """Log decays of channels as one wide row; the bound where there is one."""
        r = self.r
        bounded = r.case.shape.mixer is KDA_BOUNDED
        wide = r.a[i].flatten(2).flatten(0, 1)
        found = super().gates(i) | {"a": wide[None], "b": r.b[i].flatten(0, 1)[None]}
        return found | {"is_kda": True, "lower_bound": -5.0 if bounded else None}

    def make_windows(self) -> None:
        """Windows that lie as rows, read and written across."""
        super().make_windows()
        self.windows, self.taken = (
            pool.transpose(-1, -2).contiguous().transpose(-1, -2)
            for pool in (self.windows, self.taken)
        )


class SerialScan(Serial):
    """Mamba2: the state update of decoding, over the nodes of a tree."""

    def __init__(self, r: Operands, exact: Callable[[int], Exact]) -> None:
        super().__init__(r, exact)
        self.scan = load("mamba.triton_ops.mamba_ssm").selective_state_update
        shape = r.case.shape
        # one value a head, seen as one a channel: the kernel knows it by its strides
        self.rate = (-r.A_log.exp())[:, None, None].expand(-1, shape.d_v, shape.d_k)
        self.skip, self.bias = (each[:, None].expand(-1, shape.d_v) for each in (r.D, r.dt_bias))

    def recur(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Outputs [B, T, Hv, dv] of convolved rows."""
        r = self.r
        c, b, x = split_rows(r.case, rows)
        out = r.x.new_empty(x.shape)
        self.scan(
            r.state[i],
            x,
            r.a[i][..., None].expand(x.shape),
            self.rate,
            b,
            c,
            self.skip,
            z=None,
            dt_bias=self.bias,
            dt_softplus=True,
            state_batch_indices=r.slots,
            out=out,
            disable_state_update=True,
            intermediate_states_buffer=self.snapshots[i % len(self.snapshots)],
            cache_steps=len(r.parents),
            retrieve_parent_token=self.parent,
            intermediate_state_indices=self.requests,
        )
        return out


# by mixer, the verifier of its trees
SERIAL: dict[str, type[Serial]] = {
    KDA.name: SerialChannels,
    KDA_BOUNDED.name: SerialChannels,
    MAMBA2.name: SerialScan,
}

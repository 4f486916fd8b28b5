"""The rounds of one engine on one rank: plain tensors in the engine's layouts, no SGLang here.

The engine keeps states and windows; this keeps what a round needs until acceptance. All of it is
allocated once, so verify may be captured in the engine's CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from bolegen_runtime.checked import CheckedModule
from bolegen_runtime.lifetimes import LayerWeights
from bolegen_runtime.metrics import Metrics
from bolegen_runtime.sglang.layers import RoundSpec
from bolegen_runtime.topology import trace_links

__all__ = ["Links", "TreeVerifier", "count_bytes"]

Links = tuple[torch.Tensor, torch.Tensor]


class TreeVerifier:
    """Verify and commit for up to ``batch`` requests."""

    def __init__(self, spec: RoundSpec, batch: int, device: torch.device | str) -> None:
        self.spec = spec
        self.module = spec.load_module()
        self.factors = self.module.allocate(batch, spec.layers, device)
        nodes = spec.bounds.nodes
        # a chain has nothing to trace
        kept = 0 if spec.bounds.chain else batch
        self.parents = torch.full((kept, nodes), -1, dtype=torch.int32, device=device)
        self.live = torch.zeros(kept, nodes, dtype=torch.bool, device=device)
        self.metrics = Metrics(self.module, device)
        self._looked_at: set[int] = set()

    @property
    def bytes(self) -> int:
        """All memory of a round."""
        own = self.parents.numel() * 4 + self.live.numel()
        return int(self.factors.round_bytes + self.factors.scratch_bytes) + own

    def verify(
        self,
        layer: int,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: LayerWeights,
        pools: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        links: Links | None,
    ) -> torch.Tensor:
        """Score one layer: x [R * N, C] before the convolution -> [1, R * N, Hv, d_v].

        a, b [R * N, Hv] or [1, R * N, Hv]; pools: the layer's states [slots, Hv, d_v, d_k] and
        windows [slots, C, W-1]; slots [R], negative = padded; links: first children and next
        siblings [R, N], None for chains. Layer 0 traces the tree for all. Rows behind as many
        requests as there is room for are padding as well, whatever their slots: zeros. Raises
        ValueError.
        """
        nodes, heads = self.spec.bounds.nodes, self.spec.heads[1]
        given = x.shape[0] // nodes
        if given * nodes != x.shape[0]:
            raise ValueError(f"x: expected requests of {nodes} nodes, got {x.shape[0]} rows")
        # engines that align batches may pad them past what they run at once
        rows = min(given, self.factors.batch)
        slots = slots[:rows]
        parents = live = None
        if links is not None:
            first, sibling = links
            parents, live = self.parents[:rows], self.live[:rows]
            if layer == 0:
                trace_links(first[:rows], sibling[:rows], slots, parents, live)
        self.factors.traced = layer > 0
        # each layer's arguments are looked at once, before the engine captures a graph
        self.factors.check = layer not in self._looked_at
        self._looked_at.add(layer)
        out: torch.Tensor = self.module.verify(
            x.view(given, nodes, -1)[:rows], a.reshape(given, nodes, heads)[:rows],
            b.reshape(given, nodes, heads)[:rows],
            weights.conv_weight, weights.A_log, weights.dt_bias, *pools, slots, self.factors,
            layer=layer, conv_bias=weights.conv_bias, parents=parents, live=live,
        )  # fmt: skip
        if rows < given:
            out = torch.cat([out, out.new_zeros(given - rows, *out.shape[1:])])
        return out.view(1, given * nodes, heads, -1)

    def commit(
        self,
        pools: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        last_node: torch.Tensor,
        track_slots: torch.Tensor | None = None,
        track_node: torch.Tensor | None = None,
    ) -> None:
        """Write accepted states and windows of all layers, and tracked ancestors' first.

        pools: states [L, slots, Hv, d_v, d_k] and windows [L, slots, C, W-1]; last_node [R] within
        the request; track_slots and track_node [R], -1 = none.
        """
        slots = slots[: last_node.shape[0]]
        self.factors.check = False
        self.module.commit(
            self.factors, *pools, slots, last_node,
            track_slots=track_slots, track_node=track_node,
        )  # fmt: skip
        self.metrics.count_round(self.factors, slots, last_node)

    def prewarm(self, pools: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Compile what no capture of verify compiles, by a commit of a padded row."""
        if isinstance(self.module, CheckedModule):  # commits nothing that it did not verify
            return
        slots = torch.full((1,), -1, dtype=torch.int32, device=self.parents.device)
        none = slots.to(torch.int64)
        self.commit(pools, slots, none)
        self.commit(pools, slots, none, none, none)
        tree = none.new_full((1, self.spec.bounds.nodes), -1)
        for links in () if self.spec.bounds.chain else (tree, tree.to(torch.int32)):
            trace_links(links, links, slots, self.parents[:1], self.live[:1])
        # those were no rounds
        self.metrics = Metrics(self.module, slots.device)

    def report(self) -> dict[str, Any]:
        """What /server_info shows: plain values; waits for the device."""
        counted = {name: _plain(value) for name, value in self.metrics.snapshot().items()}
        # snapshots have a row for padding as well; padded rows keep nothing here
        snapshots = (self.factors.batch + 1) * self.spec.snapshot_bytes()
        return {
            "module": self.module.MODULE.name,
            "nodes": self.spec.bounds.nodes,
            "depth": self.spec.bounds.depth,
            "layers": self.spec.layers,
            "round_bytes": self.bytes,
            "snapshot_bytes": snapshots,
            **counted,
        }


def count_bytes(spec: RoundSpec) -> tuple[int, int]:
    """Bytes of a round for each request, and once: at least what TreeVerifier(spec, ...) takes.

    One request has some scratch of two, which is counted once. Nothing is allocated.
    """
    module = spec.load_module()
    one, two, three = (
        f.round_bytes + f.scratch_bytes
        for f in (module.allocate(n, spec.layers, "meta") for n in (1, 2, 3))
    )
    row = three - two
    links = 0 if spec.bounds.chain else 5 * spec.bounds.nodes
    return row + links, max(one - row, two - 2 * row)


def _plain(value: Any) -> Any:
    """Keys that JSON can write."""
    if isinstance(value, dict):
        return {str(key): _plain(held) for key, held in value.items()}
    return value

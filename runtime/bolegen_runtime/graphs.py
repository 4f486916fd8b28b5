"""CUDA graphs of verify: one per batch size, each over all layers, replayed with new contents.

All graphs of a pool share one set of buffers, so a pool serves one round at a time: verify,
sample, commit. An engine that captures its whole forward calls verify inside of that instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from bolegen_runtime.arguments import expect_kind, expect_module, expect_whole
from bolegen_runtime.buffers import RoundBuffers
from bolegen_runtime.lifetimes import CanonicalState, LayerWeights, SlotClaims
from bolegen_runtime.rounds import Round

__all__ = ["GraphError", "GraphPool", "VerifyGraph"]


class GraphError(RuntimeError):
    """A batch that no graph holds, a graph that is not captured, or one that cannot be."""


class VerifyGraph:
    """verify of all layers for the first ``batch`` rows of ``buffers``.

    weights: one LayerWeights a layer; state [L, slots, Hv, d_v, d_k] and conv_state
    [L, slots, C, W-1], None without a convolution: the engine's pools, read where they are.
    """

    def __init__(
        self,
        module: ModuleType,
        weights: Sequence[LayerWeights],
        state: torch.Tensor,
        conv_state: torch.Tensor | None,
        buffers: RoundBuffers,
        *,
        batch: int,
    ) -> None:
        expect_module(module)
        expect_kind("buffers", buffers, RoundBuffers, "RoundBuffers")
        expect_whole("batch", batch, 1, buffers.slots.shape[0])
        _check_pool(weights, state, conv_state, (batch,))
        if buffers.x.shape[0] != len(weights):
            raise ValueError(
                f"buffers: expected {len(weights)} layers, one for each of weights, got "
                f"{buffers.x.shape[0]}"
            )
        self.batch = batch
        self._module, self._weights = module, tuple(weights)
        self._state, self._conv_state = state, conv_state
        self._buffers = buffers
        self._graph: torch.cuda.CUDAGraph | None = None

    def launch(self) -> None:
        """Run verify now, without a graph; kernels that never ran are compiled."""
        try:
            for layer, weights in enumerate(self._weights):
                # all layers have one topology
                self._buffers.factors.traced = layer > 0
                self._launch_layer(layer, weights)
        finally:
            self._buffers.factors.traced = False

    def _launch_layer(self, layer: int, weights: LayerWeights) -> None:
        at, n = self._buffers, self.batch
        self._module.verify(
            at.x[layer, :n],
            None if at.a is None else at.a[layer, :n],
            None if at.b is None else at.b[layer, :n],
            weights.conv_weight,
            weights.A_log,
            weights.dt_bias,
            self._state[layer],
            None if self._conv_state is None else self._conv_state[layer],
            at.slots[:n],
            at.factors,
            layer=layer,
            **weights.options,
            parents=None if at.parents is None else at.parents[:n],
            live=at.live[:n],
            out=at.out[layer, :n],
        )

    def commit(self) -> None:
        """Commit ``last_node`` of all rows and layers, in one launch outside of the graph."""
        at, n = self._buffers, self.batch
        last = at.last_node[:n]
        self._module.commit(at.factors, self._state, self._conv_state, at.slots[:n], last)

    def prewarm(self) -> None:
        """Check every argument and compile every kernel, by one round of padded rows.

        Raises ValueError as the module's verify and commit do.
        """
        at = self._buffers
        at.slots.fill_(-1)
        at.last_node.fill_(-1)
        at.factors.check = True
        self.launch()
        self.commit()

    def capture(self) -> None:
        """Prewarm, then capture verify; argument checks stay off from then on.

        Raises GraphError where the state is not on a CUDA device, and what prewarm raises.
        """
        device = self._state.device
        if device.type != "cuda":
            raise GraphError(f"graphs need a CUDA device, and the state is on {device}")
        with torch.cuda.device(device):
            self.prewarm()
            torch.cuda.synchronize()
            self._buffers.factors.check = False
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.launch()
        self._graph = graph

    @property
    def captured(self) -> torch.cuda.CUDAGraph:
        """Replays verify on what the buffers hold. Raises GraphError before capture()."""
        if self._graph is None:
            raise GraphError(f"the graph of batch {self.batch} is not captured; call capture()")
        return self._graph


class GraphPool:
    """Graphs of one module for several batch sizes, and the buffers they share.

    weights, state, conv_state: as in VerifyGraph. batches: the sizes to capture; a round runs in
    the smallest that holds it, and its other rows are padded. claims: the checked mode of
    rounds. Raises ValueError, naming the argument.
    """

    def __init__(
        self,
        module: ModuleType,
        weights: Sequence[LayerWeights],
        state: torch.Tensor,
        conv_state: torch.Tensor | None,
        *,
        batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
        claims: SlotClaims | None = None,
    ) -> None:
        _check_pool(weights, state, conv_state, batches)
        self.batches = tuple(sorted(set(batches)))
        layers = len(weights)
        self.buffers = RoundBuffers.allocate(module, self.batches[-1], layers, state.device)
        self.graphs = {
            batch: VerifyGraph(module, weights, state, conv_state, self.buffers, batch=batch)
            for batch in self.batches
        }
        self.round = Round(
            module,
            CanonicalState(state, conv_state),
            factors=self.buffers.factors,
            claims=claims,
        )
        self._rows = 0

    def capture(self) -> None:
        """Compile and capture every batch size, the largest first."""
        self.round.discard()
        self.buffers.prewarm()
        for batch in reversed(self.batches):
            self.graphs[batch].capture()

    def find_graph(self, rows: int) -> VerifyGraph:
        """The smallest graph that holds ``rows`` rows. Raises GraphError, which lists them all."""
        expect_whole("rows", rows, 0)
        for batch in self.batches:
            if rows <= batch:
                return self.graphs[batch]
        have = ", ".join(map(str, self.batches))
        raise GraphError(
            f"no graph holds {rows} rows; this pool has batches {have}. Split the round, or make "
            "the pool with a larger batch"
        )

    def verify(
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
    ) -> torch.Tensor:
        """Replay on a new round: out [L, rows, n, Hv, d_v], which the next round overwrites.

        Arguments as in RoundBuffers.fill, which copies them; n may be less than the module's
        nodes. Allocates nothing. Raises ValueError for an argument, GraphError for a batch,
        LifetimeError with claims; there is then no round to commit.
        """
        if not isinstance(slots, torch.Tensor) or slots.dim() != 1:
            raise ValueError("slots: expected a tensor of one axis [rows]")
        graph = self.find_graph(slots.shape[0])
        captured = graph.captured
        self.round.begin(slots)
        try:
            self.buffers.fill(
                x, a, b, slots, parents=parents, links=links, live=live, counts=counts
            )
            self.round.replay(captured)
        except BaseException:
            self.round.discard()
            raise
        self._rows = x.shape[1]
        return self.buffers.out[:, : x.shape[1], : x.shape[2]]

    def commit(self, last_node: torch.Tensor) -> None:
        """Commit the round verified last: last_node [rows] int, -1 = nothing for that row.

        Raises LifetimeError where there is none, or it is committed already.
        """
        self.round.check_verified()
        self.buffers.fill_last(last_node, self._rows)
        at, n = self.buffers, self.find_graph(self._rows).batch
        self.round.commit(at.slots[:n], at.last_node[:n])


def _check_pool(weights: object, state: object, conv_state: object, batches: object) -> None:
    """What verify does not check itself, when it warms up."""
    if not isinstance(batches, Sequence) or not batches:
        raise ValueError(f"batches: expected sizes of at least 1, got {batches!r:.60}")
    for batch in batches:
        expect_whole("batches", batch, 1)
    if not isinstance(weights, Sequence) or not all(isinstance(w, LayerWeights) for w in weights):
        raise ValueError("weights: expected one LayerWeights a layer")
    layers = []
    pools = [("state", state, 5)]
    if conv_state is not None:
        pools.append(("conv_state", conv_state, 4))
    for name, pool, axes in pools:
        if not isinstance(pool, torch.Tensor) or pool.dim() != axes:
            have = tuple(pool.shape) if isinstance(pool, torch.Tensor) else type(pool).__name__
            raise ValueError(f"{name}: expected {axes} axes, a layer each first, got {have}")
        layers.append(pool.shape[0])
    if not weights or set(layers) != {len(weights)}:
        raise ValueError(
            f"weights: expected one a layer, got {len(weights)}, with pools of "
            f"{' and '.join(map(str, layers))} layers"
        )

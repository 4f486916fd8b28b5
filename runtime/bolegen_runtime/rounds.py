"""A round's turns: begin, verify of every layer, commit; each once, in this order.

What a Round knows is on the host and costs no wait for the device. With SlotClaims, the checked
mode, it also reads the slots, which does wait.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from bolegen_runtime.arguments import (
    INTEGERS,
    expect_kind,
    expect_module,
    expect_tensor,
    expect_whole,
)
from bolegen_runtime.lifetimes import (
    CanonicalState,
    LayerWeights,
    LifetimeError,
    SlotClaims,
    split_factors,
)

__all__ = ["Round"]


class Round:
    """One round over all layers: begin, verify each layer once (or replay a graph), commit.

    Commits nothing unless every layer was verified, and nothing twice. An exception between
    verify and commit leaves the slots as they were: ``discard`` then drops the round. Without
    ``claims``, a begin over a round that is not committed discards it; with them it is an error,
    as is a slot that another round has claimed, or one written in between.

    factors: those of ``module.allocate``, by default for ``batch`` rows of all layers.
    """

    def __init__(
        self,
        module: ModuleType,
        canonical: CanonicalState,
        *,
        batch: int = 0,
        factors: Any = None,
        claims: SlotClaims | None = None,
    ) -> None:
        expect_module(module)
        expect_kind("canonical", canonical, CanonicalState)
        if claims is not None:
            expect_kind("claims", claims, SlotClaims)
        self.canonical = canonical
        if factors is None:
            factors = module.allocate(batch, canonical.layers, canonical.state.device)
        self.allocated = factors
        self.factors, self.scratch = split_factors(factors)
        self._module, self._claims = module, claims
        self._waiting: set[int] | None = None  # layers to verify; None: no round
        self._seen: tuple[str, int] | None = None  # which verify, and its rows; None: not known

    def begin(self, slots: torch.Tensor) -> None:
        """Start a round on slots [B] int32 or int64, negative = a padded row.

        Raises ValueError for another tensor, LifetimeError with claims.
        """
        self._expect_rows("slots", slots)
        if self._claims is None:
            self.discard()
        elif self._waiting is not None:
            raise LifetimeError(
                "the round before is neither committed nor discarded, and its factors would be "
                "written over; call commit or discard first"
            )
        else:
            self._claims.take(self, self.canonical, slots, self.allocated)
        self._waiting = set(range(self.canonical.layers))
        self._seen = None

    def verify(
        self,
        layer: int,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: LayerWeights,
        slots: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """One layer, as the module's verify; options: parents, live, out, schedule.

        Inside a graph capture nothing runs, so nothing counts as verified: see ``replay``.
        Raises LifetimeError out of turn, and what the module raises.
        """
        expect_kind("weights", weights, LayerWeights, "a layer's LayerWeights")
        self._check_turn("verify", layer, x, slots)
        known = self.canonical
        out: torch.Tensor = self._module.verify(
            x, a, b, weights.conv_weight, weights.A_log, weights.dt_bias, known.state[layer],
            None if known.conv_state is None else known.conv_state[layer], slots, self.allocated,
            layer=layer, conv_bias=weights.conv_bias, **options,
        )  # fmt: skip
        self._note("verify", layer, x, slots)
        return out

    def verify_qkv(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        slots: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """One layer, as the module's verify_qkv; otherwise as ``verify``."""
        self._check_turn("verify_qkv", layer, q, slots)
        out: torch.Tensor = self._module.verify_qkv(
            q, k, v, a, b, A_log, dt_bias, self.canonical.state[layer], slots,
            self.allocated, layer=layer, **options,
        )  # fmt: skip
        self._note("verify_qkv", layer, q, slots)
        return out

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph that holds verify of every layer."""
        if not callable(getattr(graph, "replay", None)):
            raise ValueError(f"graph: expected a CUDA graph, got {type(graph).__name__}")
        if self._waiting is None:
            raise LifetimeError("there is no round to verify; call begin first")
        graph.replay()
        self._waiting.clear()

    def commit(
        self,
        slots: torch.Tensor,
        last_node: torch.Tensor,
        *,
        track_slots: torch.Tensor | None = None,
        track_node: torch.Tensor | None = None,
    ) -> None:
        """As the module's commit, once a round.

        Raises LifetimeError and what the module raises, before any slot is written; the round is
        then still there. A CheckedError is raised after: discard the round then.
        """
        self.check_verified()
        self._expect_rows("slots", slots)
        if self._seen is not None and len(slots) != self._seen[1]:
            raise LifetimeError(f"slots: {self._seen[1]} rows were verified, now {len(slots)}")
        if self._claims is not None:
            self._claims.check_slots(self, slots)
            self._claims.check_bits(self, self.canonical)
            if track_slots is not None:
                self._expect_rows("track_slots", track_slots)
                self._claims.check_tracks(track_slots)
        self._module.commit(
            self.allocated, self.canonical.state, self.canonical.conv_state, slots, last_node,
            track_slots=track_slots, track_node=track_node,
        )  # fmt: skip
        self.discard()

    def check_verified(self) -> None:
        """Raise LifetimeError unless commit may come next."""
        if self._waiting is None:
            raise LifetimeError(
                "there is no round to commit: it was not verified, or is committed or discarded"
            )
        if self._waiting:
            missing = ", ".join(map(str, sorted(self._waiting)))
            raise LifetimeError(f"layers {missing} of this round were not verified")

    def discard(self) -> None:
        """Drop the round, if there is one: slots stay as they are."""
        self._waiting = None
        if self._claims is not None:
            self._claims.release(self)

    def _check_turn(self, call: str, layer: int, rows: Any, slots: torch.Tensor) -> None:
        expect_whole("layer", layer, 0, self.canonical.layers - 1)
        self._expect_rows("slots", slots)
        if _is_capturing(rows):
            return
        if self._waiting is None:
            raise LifetimeError("there is no round to verify; call begin first")
        if layer not in self._waiting:
            raise LifetimeError(f"layer {layer} of this round is verified; begin a new round")
        if self._seen is not None and self._seen[0] != call:
            raise LifetimeError(
                f"{call}: other layers of this round went through {self._seen[0]}, and commit "
                "takes a round of one kind"
            )
        # what an engine's own capture may have set; here each layer looks at the tree itself
        self.allocated.traced = False
        if self._claims is not None:
            self._claims.check_slots(self, slots)

    def _expect_rows(self, name: str, rows: torch.Tensor) -> None:
        expect_tensor(name, rows, (None,), INTEGERS, self.canonical.state.device)

    def _note(self, call: str, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        if self._waiting is not None and not _is_capturing(rows):
            self._waiting.discard(layer)
            self._seen = call, slots.shape[0]


def _is_capturing(rows: Any) -> bool:
    cuda = isinstance(rows, torch.Tensor) and rows.is_cuda
    return cuda and torch.cuda.is_current_stream_capturing()

"""A round's turns: begin, verify of every layer, commit; each once, in this order.

A folded round leaves its commit to the next round's verify, in factors of two buffers.

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
from bolegen_runtime.pending import Pending

__all__ = ["Round"]


class Round:
    """One round over all layers: begin, verify each layer once (or replay a graph), commit.

    Commits nothing unless every layer was verified, and nothing twice. An exception between
    verify and commit leaves the slots as they were: ``discard`` then drops the round. Without
    ``claims``, a begin over a round that is not committed discards it; with them it is an error,
    as is a slot that another round has claimed, or one written in between.

    factors: those of ``module.allocate``, by default for ``batch`` rows of all layers.

    folded: commit launches nothing; the next round's verify does its work, layer by layer, in the
    same rows. ``flush`` does it alone, before a slot leaves or rows change. ``factors`` is then a
    pair, which the rounds use in turn.
    """

    def __init__(
        self,
        module: ModuleType,
        canonical: CanonicalState,
        *,
        batch: int = 0,
        factors: Any = None,
        claims: SlotClaims | None = None,
        folded: bool = False,
    ) -> None:
        expect_module(module)
        expect_kind("canonical", canonical, CanonicalState)
        if claims is not None:
            expect_kind("claims", claims, SlotClaims)
        self.canonical, self.folded = canonical, folded
        if factors is None:
            rows = batch, canonical.layers, canonical.state.device
            factors = module.allocate(*rows)
            if folded:
                factors = factors, module.allocate(*rows)
        if isinstance(factors, tuple) != folded or (folded and len(factors) != 2):
            raise ValueError("factors: expected a pair for folded rounds, and no pair for others")
        self._buffers: tuple[Any, ...] = factors if folded else (factors,)
        self._use(self._buffers[0])
        self._pending: Pending | None = None  # a round that is not in the slots of all layers
        self._module, self._claims = module, claims
        self._waiting: set[int] | None = None  # layers to verify; None: no round
        self._seen: tuple[str, int] | None = None  # which verify, and its rows; None: not known

    def begin(self, slots: torch.Tensor) -> None:
        """Start a round on slots [B] int32 or int64, negative = a padded row.

        Raises ValueError for another tensor, LifetimeError with claims.
        """
        self._expect_rows("slots", slots)
        held = len(slots) if self._pending is None else len(self._pending.last_node)
        if held != len(slots):
            raise LifetimeError(
                f"slots: a round of {held} rows is pending, and this one has {len(slots)}; "
                "call flush first"
            )
        if self._claims is None:
            self.discard()
        elif self._waiting is not None:
            raise LifetimeError(
                "the round before is neither committed nor discarded, and its factors would be "
                "written over; call commit or discard first"
            )
        else:
            if self._pending is not None:
                self._claims.check_slots(self, slots)
                self._claims.check_bits(self, self.canonical)
                self._claims.check_factors(self, self.allocated)
                self._claims.release(self)
            self._claims.take(self, self.canonical, slots, self.allocated)
        self._waiting = set(range(self.canonical.layers))
        self._seen = None

    def verify(
        self,
        layer: int,
        x: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
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
            layer=layer, **weights.options, **self._pending_at(layer), **options,
        )  # fmt: skip
        self._note("verify", layer, x, slots)
        return out

    def verify_qkv(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        slots: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """One layer, as the module's verify_qkv; otherwise as ``verify``."""
        self._check_turn("verify_qkv", layer, q, slots)
        out: torch.Tensor = self._module.verify_qkv(
            q, k, v, a, b, A_log, dt_bias, self.canonical.state[layer], slots,
            self.allocated, layer=layer, **self._pending_at(layer), **options,
        )  # fmt: skip
        self._note("verify_qkv", layer, q, slots)
        return out

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph that holds verify of every layer. LifetimeError for folded rounds."""
        if not callable(getattr(graph, "replay", None)):
            raise ValueError(f"graph: expected a CUDA graph, got {type(graph).__name__}")
        if self.folded:
            raise LifetimeError("a folded round is not replayed: its graph says what is pending")
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
        """As the module's commit, once a round; ``last_node`` is kept where that is folded.

        Raises LifetimeError and what the module raises, before any slot is written; the round is
        then still there. A CheckedError is raised after: discard the round then.
        """
        self.check_verified()
        self._expect_rows("slots", slots)
        if self._seen is not None and len(slots) != self._seen[1]:
            raise LifetimeError(f"slots: {self._seen[1]} rows were verified, now {len(slots)}")
        self._check_claims(slots, track_slots)
        if self.folded:
            if track_slots is not None:
                raise LifetimeError("track_slots: a folded round is not written yet; flush it")
            rows, device = (len(slots),), self.canonical.state.device
            expect_tensor("last_node", last_node, rows, INTEGERS, device, unit=True)
            layers = set(range(self.canonical.layers))
            self._pending = Pending(self.allocated, last_node.clone(), layers)
            self._use(self._buffers[self.allocated is self._buffers[0]])
            self._waiting = None
            return
        self._module.commit(
            self.allocated, self.canonical.state, self.canonical.conv_state, slots, last_node,
            track_slots=track_slots, track_node=track_node,
        )  # fmt: skip
        self.discard()

    @property
    def pending(self) -> bool:
        """Whether the slots do not have the round that was committed last."""
        return self._pending is not None

    def flush(
        self,
        slots: torch.Tensor,
        *,
        track_slots: torch.Tensor | None = None,
        track_node: torch.Tensor | None = None,
    ) -> None:
        """Write the round that is pending, as the module's flush: its slots may then leave.

        Raises LifetimeError where none is, or another round is open; and what the module raises.
        """
        if self._pending is None or self._waiting is not None:
            state = "nothing is pending" if self._pending is None else "another round is open"
            raise LifetimeError(f"flush: {state}; it comes after commit and before begin")
        self._expect_rows("slots", slots)
        self._check_claims(slots, track_slots)
        self._pending.write(self._module, self.canonical, slots, track_slots, track_node)
        self._pending = None
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
        """Drop the round, if there is one: slots stay as they are, and what is pending stays."""
        was_open, self._waiting = self._waiting is not None, None
        if self._claims is not None and self._pending is None:
            self._claims.release(self)
        elif self._claims is not None and was_open:
            self._claims.renew(self, self.canonical)

    def _use(self, factors: Any) -> None:
        self.allocated = factors
        self.factors, self.scratch = split_factors(factors)

    def _pending_at(self, layer: int) -> dict[str, Any]:
        """What verify of a layer has to commit first."""
        return {} if self._pending is None else self._pending.options_at(layer)

    def _check_turn(self, call: str, layer: int, rows: Any, slots: torch.Tensor) -> None:
        expect_whole("layer", layer, 0, self.canonical.layers - 1)
        self._expect_rows("slots", slots)
        if _is_capturing(rows):
            if self.folded:
                raise LifetimeError("a folded round is not captured: pass pending= to the module")
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

    def _check_claims(self, slots: torch.Tensor, track_slots: torch.Tensor | None) -> None:
        """With claims: the round's own slots, as they were, and tracks into free ones."""
        if self._claims is None:
            return
        self._claims.check_slots(self, slots)
        self._claims.check_bits(self, self.canonical)
        if track_slots is not None:
            self._expect_rows("track_slots", track_slots)
            self._claims.check_tracks(track_slots)

    def _expect_rows(self, name: str, rows: torch.Tensor) -> None:
        expect_tensor(name, rows, (None,), INTEGERS, self.canonical.state.device)

    def _note(self, call: str, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        if self._waiting is not None and not _is_capturing(rows):
            self._waiting.discard(layer)
            self._seen = call, slots.shape[0]
            if self._pending is not None:
                self._pending.layers.discard(layer)
                if not self._pending.layers:
                    self._pending = None
            if self.folded and self._claims is not None and not self._waiting:
                self._claims.renew(self, self.canonical)


def _is_capturing(rows: Any) -> bool:
    cuda = isinstance(rows, torch.Tensor) and rows.is_cuda
    return cuda and torch.cuda.is_current_stream_capturing()

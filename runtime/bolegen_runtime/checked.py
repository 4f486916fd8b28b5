"""Checked mode: a module that runs the recurrence beside each call and raises on disagreement.

For finding faults, not for serving: every call waits for the device, and pools are read whole.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime.arguments import expect_module
from bolegen_runtime.contract import (
    Finding,
    LayerRound,
    measure_commit,
    measure_verify,
    read_trees,
    refuse_unbounded,
)
from bolegen_runtime.lifetimes import OF_LAYERS, sum_bits

__all__ = ["CheckedError", "CheckedModule", "check_findings"]

Tensor = torch.Tensor
_Verified = tuple[LayerRound, list[list[int]]]  # a layer, and a number of each slot of each pool
_POOLS = ("state", "conv_state")


class CheckedError(RuntimeError):
    """A result beyond the contract of docs/theory.md, or a call that cannot be right."""


class CheckedModule(ModuleType):
    """A generated module whose verify, verify_qkv and commit are checked; all else is its own.

    Verify: convolved rows and outputs against the recurrence from the same pools, zeros for dead
    and padded rows, pools unchanged. Commit: every written state and window from what verify was
    given, every other slot unchanged; each layer verified since the last commit, from the same
    slots, which have not changed since; likewise flush, and what is pending. Raises CheckedError,
    which names layer, request, slot, head, node and error over limit, after the launch;
    ValueError for a module without bounds.
    """

    def __init__(self, module: ModuleType) -> None:
        expect_module(module)
        super().__init__(module.__name__, module.__doc__)
        refuse_unbounded(module)
        self._module = module
        self._rounds: dict[int, dict[int, _Verified]] = {}
        self._whole: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def verify(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's verify, checked."""
        return self._verify(self._module.verify, args, kwargs)

    def verify_qkv(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's verify_qkv, checked."""
        return self._verify(self._module.verify_qkv, args, kwargs)

    def commit(self, *args: Any, **kwargs: Any) -> None:
        """The module's commit, checked."""
        self._commit(self._module.commit, args, kwargs)

    def flush(self, *args: Any, **kwargs: Any) -> None:
        """The module's flush, checked."""
        self._commit(self._module.flush, args, kwargs)

    def _commit(self, commit: Any, args: Any, kwargs: Any) -> None:
        at = _bind(commit, args, kwargs)
        with _refused_by(commit, args, kwargs):
            _refuse_capture(at["state"])
            pools = [at[name] for name in _POOLS if at[name] is not None]
            held, first = self._find_rounds(at["factors"])
            rounds = _open_round(held, range(first, first + pools[0].shape[0]))
            writes = _plan_writes(rounds[0][0], at)
            marks = [[_mark(pool[layer]) for pool in pools] for layer in range(len(rounds))]
            _expect_verified(rounds, writes, marks)
            sources = [rounds[0][0].slots[row] for row, _ in writes.values()]
            before = [pool[:, sources] for pool in pools]
        commit(*args, **kwargs)
        for r, _ in rounds:
            held.pop(r.layer)  # a round is committed once
        found = []
        for layer, (r, _) in enumerate(rounds):
            _expect_others(r.layer, [pool[layer] for pool in pools], marks[layer], set(writes))
            for i, (slot, (row, node)) in enumerate(writes.items()):
                both = [pool[layer, i] for pool in before], [pool[layer, slot] for pool in pools]
                found += measure_commit(self._module, r, row, node, slot, both)
        check_findings(found)

    def _verify(self, verify: Any, args: Any, kwargs: Any) -> Tensor:
        at = _bind(verify, args, kwargs)
        with _refused_by(verify, args, kwargs):
            _refuse_capture(at["state"])
            pools = [at[name] for name in _POOLS if at.get(name) is not None]
            marks = [_mark(pool) for pool in pools]
            held, writes = self._open_pending(at, marks)
            before = [pool[list(writes)] for pool in pools]
        out: Tensor = verify(*args, **kwargs)
        r = self._record(at)
        if held is not None:  # a round is committed once
            self._rounds_of(at["pending"][0]).pop(r.layer)
        _expect_others(r.layer, pools, marks, set(writes))
        for i, (slot, (row, node)) in enumerate(writes.items()):
            both = [pool[i] for pool in before], [pool[slot] for pool in pools]
            check_findings(measure_commit(self._module, held, row, node, slot, both))
        if writes:
            marks = [_mark(pool) for pool in pools]
        check_findings(measure_verify(self._module, r, at["state"], at.get("conv_state"), out))
        rounds = self._rounds_of(at["factors"])
        if r.layer in rounds:  # a new round; the one before was never committed
            rounds.clear()
        rounds[r.layer] = r, marks
        return out

    def _record(self, at: dict[str, Any]) -> LayerRound:
        """Copies of what verify was given: an engine reuses its memory from layer to layer."""
        x = at.get("x")
        slots, nodes = at["slots"].tolist(), at["a"].shape[1]
        if x is None:
            rows = torch.cat([at[name].flatten(2) for name in "qkv"], 2)
        else:
            rows = at["factors"].convolved_rows(at["layer"])[: len(slots), :nodes].clone()
            x = x.clone()
        return LayerRound(
            layer=at["layer"],
            x=x,
            rows=rows,
            a=at["a"].clone(),
            b=at["b"].clone(),
            conv_weight=at.get("conv_weight"),
            conv_bias=at.get("conv_bias"),
            A_log=at["A_log"],
            dt_bias=at["dt_bias"],
            slots=slots,
            trees=read_trees(self._module, slots, nodes, at["parents"], at["live"]),
        )

    def _open_pending(
        self, at: dict[str, Any], marks: list[list[int]]
    ) -> tuple[Any, dict[int, tuple[int, int]]]:
        """The layer of the round that is pending, and what verify writes of it."""
        if at["pending"] is None:
            return None, {}
        factors, last_node = at["pending"]
        held = self._rounds_of(factors).get(at["layer"])
        if held is None:
            if int(last_node.max()) >= 0:
                raise CheckedError(
                    f"pending: layer {at['layer']} was not verified with these factors since they "
                    "were committed last"
                )
            return None, {}
        writes = _plan_writes(held[0], at | {"last_node": last_node, "track_slots": None})
        _expect_verified([held], writes, [marks])
        return held[0], writes

    def _rounds_of(self, factors: Any) -> dict[int, _Verified]:
        """Layers verified since the last commit of these factors."""
        key = id(factors)
        if key not in self._rounds:
            self._rounds[key], self._whole[key] = {}, factors
            weakref.finalize(factors, self._rounds.pop, key, None)
        return self._rounds[key]

    def _find_rounds(self, factors: Any) -> tuple[dict[int, _Verified], int]:
        """What was verified into these factors or those that they view, and their first layer."""
        others = () if id(factors) in self._whole else self._whole.items()
        for key, whole in others:
            layer = _find_layer(factors, whole)
            if layer is not None:
                return self._rounds[key], layer
        return self._rounds_of(factors), 0


def _find_layer(part: Any, whole: Any) -> int | None:
    """The layer of ``whole`` where ``part``, views of some of its layers, begins; None: none."""
    for name in OF_LAYERS:
        view, held = getattr(part, name, None), getattr(whole, name, None)
        if view is None or held is None:
            continue
        same = view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        layer, rest = divmod(view.storage_offset() - held.storage_offset(), held.stride(0) or 1)
        return layer if same and not rest and 0 <= layer < held.shape[0] else None
    return None


def _open_round(rounds: dict[int, _Verified], layers: range) -> list[_Verified]:
    """The round that may be committed."""
    missing = [layer for layer in layers if layer not in rounds]
    if missing:
        raise CheckedError(
            f"commit of {len(layers)} layers: expected each to be verified since the last commit, "
            f"but layer {missing[0]} was not; verify every layer, then commit once"
        )
    return [rounds[layer] for layer in layers]


def check_findings(found: Sequence[Finding]) -> None:
    """Raise CheckedError with the worst finding where one is over its limit."""
    over = sorted((f for f in found if f.ratio > 1), key=lambda f: -f.ratio)
    if over:
        more = f"; {len(over) - 1} more over their limits" if len(over) > 1 else ""
        raise CheckedError(f"{over[0]}{more}")


def _bind(call: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(call).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


@contextmanager
def _refused_by(call: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Arguments that cannot even be looked at are refused in the module's own words."""
    try:
        yield
    except CheckedError:
        raise
    except Exception:
        call(*args, **kwargs)
        raise


def _refuse_capture(state: Tensor) -> None:
    if state.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CheckedError(
            "checked mode waits for the device, which a capture cannot; capture the module "
            "without it, and check single rounds with capture_round and replay_round"
        )


def _plan_writes(r: LayerRound, at: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Slots that commit must write, with the request and node that each gets."""
    slots, last = at["slots"].tolist(), at["last_node"].tolist()
    if len(slots) != len(r.slots):
        raise CheckedError(f"commit: expected {len(r.slots)} rows as verified, got {len(slots)}")
    tracks = [(-1, -1)] * len(slots)
    if at["track_slots"] is not None:
        tracks = list(zip(at["track_slots"].tolist(), at["track_node"].tolist(), strict=True))
    tracked, accepted = {}, {}
    for row, (slot, node, track) in enumerate(zip(slots, last, tracks, strict=True)):
        if slot < 0 or node < 0:
            continue
        if slot != r.slots[row]:
            raise CheckedError(
                f"commit: request {row} was verified from slot {r.slots[row]} and is committed "
                f"into slot {slot}"
            )
        path = r.trees[row].path(node)
        if not path:
            continue
        accepted[slot] = row, node
        if track[0] >= 0 and track[1] in path:
            tracked[track[0]] = row, track[1]
    return tracked | accepted


def _mark(pool: Tensor) -> list[int]:
    """A number of each slot's bits."""
    return [sum_bits(held) for held in pool]


def _expect_others(
    layer: int, pools: list[Tensor], marks: list[list[int]], written: set[int]
) -> None:
    """Slots that are not in ``written`` hold what they held."""
    for name, pool, mark in zip(_POOLS, pools, marks, strict=False):
        for slot, (old, new) in enumerate(zip(mark, _mark(pool), strict=True)):
            if old != new and slot not in written:
                raise CheckedError(
                    f"{name}: layer {layer}, slot {slot} has changed, and nothing was to be "
                    "written there"
                )


def _expect_verified(
    rounds: list[_Verified],
    writes: dict[int, tuple[int, int]],
    marks: list[list[list[int]]],
) -> None:
    """The states and windows that are about to be committed are those that were verified."""
    for (r, verified), held in zip(rounds, marks, strict=True):
        for name, was, now in zip(_POOLS, verified, held, strict=False):
            for row, _ in writes.values():
                slot = r.slots[row]
                if now[slot] != was[slot]:
                    raise CheckedError(
                        f"{name}: layer {r.layer}, request {row}: slot {slot} has changed "
                        "between verify and commit"
                    )

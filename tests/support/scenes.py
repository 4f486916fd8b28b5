"""Right calls of the runtime's public functions on tensors, to be spoiled, on any device."""
# mypy: disable-error-code="no-untyped-call"

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from bolegen_runtime import (
    CanonicalState,
    CheckedModule,
    CudaClock,
    Metrics,
    RoundBuffers,
    RoundDump,
    VerifyGraph,
    capture_round,
    split_factors,
    trace_links,
    trace_parents,
)
from support.plan_scenes import PLAN_SCENES
from support.rounds import split
from support.scene_parts import (
    LAST,
    LAYERS,
    LINKS,
    NODES,
    ROWS,
    gates,
    ints,
    module,
    operands,
    tracks,
    tree,
    verified,
    weights_of,
)
from support.spoils import Arguments, Scene
from support.turn_scenes import TURN_SCENES

__all__ = ["SCENES"]


def by_verify(device: str, checked: bool = False) -> Scene:
    m, r = module(), operands(device)
    factors = copy.deepcopy(verified(device))
    assert r.conv_bias is not None
    given = {
        "x": r.x[0], **gates(r), "state": r.state[0], "conv_state": r.conv_state[0], **tree(r),
        "conv_weight": r.conv_weight[0], "conv_bias": r.conv_bias[0], "layer": 0, "schedule": None,
    }  # fmt: skip
    call = (CheckedModule(m) if checked else m).verify
    return Scene(
        lambda **of: call(factors=factors, **of), given, (factors,), ("out",),
        {"schedule": lambda v: v is None}, says=("factors",),
    )  # fmt: skip


def by_verify_qkv(device: str) -> Scene:
    m, r = module(), operands(device)
    factors = copy.deepcopy(verified(device))
    rows = dict(zip("qkv", split(m, r.x[0]), strict=True))
    given = {**rows, **gates(r), "state": r.state[0], **tree(r)}
    call = m.verify_qkv
    return Scene(lambda **of: call(factors=factors, **of), given, (factors,), ("out",))


def by_commit(device: str) -> Scene:
    m, r = module(), operands(device)
    factors = copy.deepcopy(verified(device))
    given = {"state": r.state, "conv_state": r.conv_state, "slots": r.slots, "parents": r.parents,
             "last_node": ints(LAST, device=device), **tracks(device)}  # fmt: skip
    call = m.commit
    writes = ("state", "conv_state")
    return Scene(lambda **of: call(factors, **of), given, (factors,), writes)


@cache
def checked(device: str) -> tuple[CheckedModule, Any]:
    """A checked module, and factors that it verified into."""
    m, factors = CheckedModule(module()), copy.deepcopy(verified(device))
    operands(device).verify(m, factors)
    return m, factors


def by_checked_commit(device: str) -> Scene:
    m, r = CheckedModule(module()), operands(device)
    known, verified_into = checked(device)
    factors = copy.deepcopy(verified_into)
    m._rounds_of(factors).update(known._rounds_of(verified_into))
    given = {"slots": r.slots, "last_node": ints(LAST, device=device), **tracks(device)}

    def call(**of: Any) -> None:
        m.commit(factors, r.state, r.conv_state, **of)

    return Scene(call, given, (factors, r.state, r.conv_state), says=("commit", "slot"))


def by_trace(device: str, name: str) -> Scene:
    r = operands(device)
    given: Arguments = {
        "slots": r.slots, "keep": r.live, "counts": ints([3, 2], device=device),
        "parents": torch.zeros(ROWS, 4, dtype=torch.int32, device=device),
        "live": torch.zeros(ROWS, 4, dtype=torch.bool, device=device),
    }  # fmt: skip
    if name == "trace_parents":
        return Scene(trace_parents, given | {"given": r.parents}, (), ("parents", "live"))
    first, sibling = (ints(of, device=device, dtype=torch.int32) for of in LINKS)
    given |= {"first_child": first, "next_sibling": sibling}
    return Scene(trace_links, given, (), ("parents", "live"))


def by_fill(device: str) -> Scene:
    r = operands(device)
    buffers = RoundBuffers.allocate(module(), ROWS + 1, LAYERS, torch.device(device))
    first, sibling = (ints(of, device=device, dtype=torch.int32) for of in LINKS)
    given = {"x": r.x, "a": r.a, "b": r.b, "slots": r.slots, "live": r.live, "first": first,
             "sibling": sibling, "counts": ints([3, 2], device=device)}  # fmt: skip
    held = {k: v for k, v in vars(buffers).items() if isinstance(v, torch.Tensor)}

    def call(first: Any, sibling: Any, **of: Any) -> None:
        buffers.fill(**of, links=(first, sibling))

    return Scene(call, given, (held,), says=("first_child", "next_sibling", "links"))


def by_checksum(device: str) -> Scene:
    r = operands(device)
    given = {"state": r.state, "conv_state": r.conv_state, "slot": 1}

    def call(slot: Any, **of: Any) -> bool:
        found = CanonicalState(**of).checksum(slot)
        packed: Arguments = {k: v if v is None else v.clone() for k, v in of.items()}
        return found == CanonicalState(**packed).checksum(slot)

    return Scene(call, given)


def by_count(device: str) -> Scene:
    r, metrics = operands(device), Metrics(module(), device)
    given = {"factors": verified(device), "slots": r.slots, "nodes": 3,
             "last_node": ints(LAST, device=device)}  # fmt: skip
    return Scene(metrics.count_round, given, (metrics._counts,),
                 fine={"nodes": lambda v: v is None})  # fmt: skip


def by_note(device: str) -> Scene:
    metrics = Metrics(module(), device)

    def call(budget: Any, reason: Any, what: Any) -> None:
        with metrics.time(what):
            pass
        metrics._times["verify"].sum = 0.0
        metrics.count_fallback(reason)
        metrics.count_budget(budget)

    given = {"budget": 3, "reason": "no graph", "what": "verify"}
    fine = {"reason": lambda v: isinstance(v, str), "budget": lambda v: v == 10**400}
    return Scene(call, given, (metrics._budgets,), fine=fine, says=("nodes",))


def by_capture(device: str) -> Scene:
    r = operands(device)
    out = torch.zeros(LAYERS, ROWS, NODES, 1, 16, dtype=r.x.dtype, device=device)
    given = {"module": module(), "weights": weights_of(r), "state": r.state, "x": r.x, "a": r.a,
             "b": r.b, "conv_state": r.conv_state, "slots": r.slots, "out": out,
             "parents": r.parents, "live": r.live}  # fmt: skip
    return Scene(lambda **of: plain(capture_round(**of)), given, says=("conv_weight",))


def plain(dump: RoundDump) -> Any:
    """Its values, whatever their dtypes."""
    return [v.double() if isinstance(v, torch.Tensor) else v for v in vars(dump).values()]


def by_dump_commit(device: str) -> Scene:
    dump = capture_round(**by_capture(device).given)
    r = operands(device)
    given = {"last_node": ints(LAST, device=device), "state": r.state, "conv_state": r.conv_state}
    return Scene(
        lambda **of: plain(dump.with_commit(**of)),
        given,
        says=("slots", "new_state", "new_conv_state"),
    )


def by_allocate(device: str, name: str) -> Scene:
    given: Arguments = {"batch": 2, "layers": 1, "device": device}
    if name == "allocate":
        return Scene(
            lambda **of: split_factors(module().allocate(**of)).__len__(), given,
            fine={"device": lambda v: v is None},
        )  # fmt: skip
    given |= {"module": module(), "gate_dtype": None}
    fine = {"device": lambda v: v is None, "gate_dtype": lambda v: v is None}
    return Scene(lambda **of: bool(RoundBuffers.allocate(**of)), given, fine=fine)


def by_graph(device: str) -> Scene:
    r = operands(device)
    buffers = RoundBuffers.allocate(module(), ROWS, LAYERS, torch.device(device))
    given = {"module": module(), "weights": weights_of(r), "state": r.state, "buffers": buffers,
             "conv_state": r.conv_state, "batch": 2}  # fmt: skip

    def call(**of: Any) -> None:
        VerifyGraph(**of).prewarm()

    return Scene(call, given, (r.state, r.conv_state))


def by_clock(device: str) -> Scene:
    """On the CPU it is made, on a GPU it measures as well."""
    given, place = {"replays": 2, "graph": True}, torch.zeros(8, device=device)

    def call(**of: Any) -> Any:
        clock = CudaClock(**of)
        return vars(clock) if device == "cpu" else [ms >= 0 for ms in clock(place.zero_)]

    return Scene(call, given, fine={"graph": lambda v: v is True})


SCENES: dict[str, Callable[[str], Scene]] = {
    "verify": by_verify, "verify_qkv": by_verify_qkv, "commit": by_commit, "fill": by_fill,
    "checked verify": lambda device: by_verify(device, True), "checked commit": by_checked_commit,
    "trace_links": lambda device: by_trace(device, "trace_links"),
    "trace_parents": lambda device: by_trace(device, "trace_parents"),
    "checksum": by_checksum, "count_round": by_count, "count": by_note,
    "capture_round": by_capture, "with_commit": by_dump_commit, "graph": by_graph,
    "CudaClock": by_clock,
    "allocate": lambda device: by_allocate(device, "allocate"),
    "buffers": lambda device: by_allocate(device, "buffers"),
}  # fmt: skip
SCENES |= TURN_SCENES | PLAN_SCENES

"""Argument types of every kernel, for the ahead-of-time build; templates hold the same names."""

from bolegen.codegen.buffers import decay_planes
from bolegen.codegen.tables import reads_tree
from bolegen.ir import Decay, Kernel, Param, TreePlan

__all__ = ["kernels_of"]

_PENDING = tuple(
    f"pending_{name}"
    for name in ("nodes", "live", "parents", "rows", "kept", "window_keys", "gates", "keys", "u")
)


def kernels_of(plan: TreePlan, name: str) -> tuple[Kernel, ...]:
    """trace, prepare, factor, solve (alone, factor or a commit inside) and commit, in order; then
    prepare and commit of verify_qkv, whose rows come without a convolution."""
    tiling = plan.tiling
    kernels = [
        Kernel(f"trace_{name}", _trace(plan), 1, 1),
        Kernel(f"prepare_{name}", _prepare(plan), tiling.warps_prepare, 1),
        Kernel(f"factor_{name}", _factor(plan), tiling.warps_factor, 1, tiling.maxnreg_factor),
        Kernel(f"solve_{name}", _solve(plan), tiling.warps_solve, tiling.stages, tiling.maxnreg),
        *_merged(plan, name),
        _folded(plan, name),
        Kernel(f"commit_{name}", _commit(plan), tiling.warps_commit, 1),
        *_without_convolution(plan, name),
    ]
    return tuple(kernels)


def _without_convolution(plan: TreePlan, name: str) -> tuple[Kernel, ...]:
    """What verify_qkv, and a commit after it, launch where the mixer has a convolution."""
    if not plan.spec.mixer.convolved:
        return ()
    prepare, commit = _prepare(plan, convolve=False), _commit(plan, convolve=False)
    return (
        Kernel(f"prepare_{name}", prepare, plan.tiling.warps_prepare, 1, label="prepare_qkv"),
        Kernel(f"commit_{name}", commit, plan.tiling.warps_commit, 1, label="commit_qkv"),
    )


def _pointers(kind: str, *names: str) -> tuple[Param, ...]:
    return tuple(Param(name, kind) for name in names)


def _absent(*names: str) -> tuple[Param, ...]:
    return tuple(Param(name, "constexpr") for name in names)


def _constants(**values: object) -> tuple[Param, ...]:
    return tuple(Param(name, "constexpr", value) for name, value in values.items())


def _strides(*names: str) -> tuple[Param, ...]:
    return tuple(Param(f"stride_{name}", "i32") for name in names)


def _where(kind: str, **there: bool) -> tuple[Param, ...]:
    """Pointers to what this mixer and layout have; the others are None."""
    return tuple(
        param
        for name, exists in there.items()
        for param in (_pointers(kind, name) if exists else _absent(name))
    )


def _given(plan: TreePlan, kind: str, name: str) -> tuple[Param, ...]:
    """A buffer that only runtime topology has."""
    return _absent(name) if plan.tree.is_static else _pointers(kind, name)


def _known(plan: TreePlan, name: str) -> tuple[Param, ...]:
    """The topology: of each row at run time, or of a static tree that is read from memory."""
    return _pointers("*i32", name) if reads_tree(plan) else _given(plan, "*i32", name)


def _trace(plan: TreePlan) -> tuple[Param, ...]:
    static = plan.tree.is_static
    nodes = () if static else (Param("nodes", "i32", aligned=False),)
    return (
        *_given(plan, "*i64", "given_parents"),
        *_pointers("*i1", "given_live"),
        *_pointers("*i64", "slots"),
        *_given(plan, "*i32", "parents"),
        *_pointers("*i8", "live"),
        *_given(plan, "*i32", "ancestors"),
        *(Param(f"stride_{s}", "i32", aligned=False) for s in ("pb", "pt", "lb", "lt")),
        *nodes,
        *_constants(HAS_LIVE=True),
    )


def _prepare(plan: TreePlan, convolve: bool = True) -> tuple[Param, ...]:
    x, mixer = plan.spec.dtype.pointer, plan.spec.mixer
    convolve = convolve and mixer.convolved
    replay = plan.spec.factors == "replay"
    strides = ("qb", "qt", "qh", "kb", "kt", "kh", "vb", "vt", "vh")
    gate_strides = ("ab", "at", "ah", "bb", "bt", "bh")
    return (
        *_pointers(x, "q", "k", "v"),
        *_where(x, a="a" in mixer.arguments, b="b" in mixer.arguments, weight=convolve),
        *_absent("bias"),
        *_where("*fp32", A_log="A_log" in mixer.arguments, dt_bias="dt_bias" in mixer.arguments),
        *_where(x, window=convolve),
        *_pointers("*i64", "slots"),
        *_pointers("*i8", "live"),
        *_known(plan, "parents"),
        *(_absent(*_PENDING[:4]) if mixer.convolved else ()),
        *_pointers(x, "qkv"),
        *_where(x, rows=mixer.convolved, window_rows=mixer.convolved),
        *_where(x, window_keys=mixer.convolved and replay, kept=mixer.convolved and replay),
        *_where("*fp32", gates=plan.spec.gates > 0),
        *_rates(plan),
        *_where(
            "*fp32", keys=not replay, vectors=mixer.unit_keys, decays=bool(decay_planes(plan))
        ),
        *_strides(*strides),
        *(Param(f"stride_{s}", "i32", aligned=False) for s in gate_strides),
        *_strides("slot"),
        *_constants(CONVOLVE=convolve, MASKED=not plan.tree.is_static),
        *_constants(TILES=1),
    )


def _factor(plan: TreePlan) -> tuple[Param, ...]:
    return (
        *_pointers(plan.spec.dtype.pointer, "qkv"),
        *_pointers("*i64", "slots"),
        *_scratch(plan),
        *_constants(HEADS=1, OVERLAP=False, DOT=_fold(plan)),
    )


def _merged(plan: TreePlan, name: str) -> tuple[Kernel, ...]:
    """The solve that few requests launch, which does factor's work itself."""
    tiling = plan.tiling
    if not tiling.merge_batch:
        return ()
    params = _solve(plan, merged=True)
    return (Kernel(f"solve_{name}", params, tiling.warps_solve, tiling.stages, label="merged"),)


def _folded(plan: TreePlan, name: str) -> Kernel:
    """The solve that first commits the round before; it has a cap of its own."""
    tiling = plan.tiling
    return Kernel(
        f"solve_{name}",
        _solve(plan, folded=True),
        tiling.warps_solve,
        tiling.stages,
        tiling.maxnreg_folded,
        label="folded",
    )


def _pending(plan: TreePlan, folded: bool) -> tuple[Param, ...]:
    """The round before, in the solve that commits it first."""
    x, convolved = plan.spec.dtype.pointer, plan.spec.mixer.convolved and folded
    replay, rates = plan.spec.factors == "replay", [f"pending_{p.name}" for p in _rates(plan)]
    kept = replay and convolved
    nodes, live, parents, rows, taps, window_keys, gates, keys, u = _PENDING
    return (
        *_where("*i64", **{nodes: folded}),
        *_where("*i8", **{live: folded}),
        *_where("*i32", **{parents: folded and not plan.tree.is_static}),
        *_where(x, **{rows: folded and plan.spec.keeps_rows, taps: kept, window_keys: kept}),
        *_where(
            "*fp32", **{gates: folded and plan.spec.gates > 0}, **dict.fromkeys(rates, folded)
        ),
        *_where("*fp32", **{keys: folded and not replay, u: folded and not replay}),
        *_where(x, window=convolved),
        *_strides("window"),
    )


def _solve(plan: TreePlan, merged: bool = False, folded: bool = False) -> tuple[Param, ...]:
    static = plan.tree.is_static
    nodes = () if static else (Param("nodes", "i32", aligned=False),)
    replay = plan.spec.factors == "replay"
    return (
        *_pointers(plan.spec.dtype.pointer, "qkv"),
        *_pointers(plan.spec.state_dtype.pointer, "state"),
        *_pointers("*i64", "slots"),
        *_scratch(plan),
        *(_absent("u") if replay else _pointers("*fp32", "u")),
        *_pointers(plan.spec.dtype.pointer, "out"),
        *(_pointers("*fp32", "D") if plan.spec.mixer.skip else ()),
        *_pending(plan, folded),
        *nodes,
        *_strides("slot", "ob", "ot", "oh"),
        *_constants(MERGED=merged, OVERLAP=False),
        *_constants(FOLD=_fold(plan) if merged else None, DOT=plan.precision.dot),
    )


def _commit(plan: TreePlan, convolve: bool = True) -> tuple[Param, ...]:
    x, convolved = plan.spec.dtype.pointer, plan.spec.mixer.convolved
    replay = plan.spec.factors == "replay"
    convolve = convolve and convolved
    return (
        *_pointers(plan.spec.state_dtype.pointer, "state"),
        *_where(x, window=convolve),
        *_pointers("*i64", "slots", "nodes", "track_slots", "track_nodes"),
        *_where(x, rows=plan.spec.keeps_rows, kept=replay and convolved),
        *_where(x, window_keys=replay and convolved),
        *_where("*fp32", gates=plan.spec.gates > 0),
        *_rates(plan),
        *_where("*fp32", keys=not replay, u=not replay),
        *_pointers("*i8", "live"),
        *_given(plan, "*i32", "parents"),
        Param("capacity", "i32", aligned=False),
        *_strides("sl", "ss", "wl", "ws"),
        *_constants(CONVOLVED=not convolve),
    )


def _scratch(plan: TreePlan) -> tuple[Param, ...]:
    """What factor leaves to solve, and what both read."""
    mixer, replay = plan.spec.mixer, plan.spec.factors == "replay"
    planes = bool(decay_planes(plan))
    return (
        *_where("*fp32", vectors=mixer.unit_keys, decays=planes),
        *(() if mixer.decay is not Decay.CHANNEL else _pointers("*fp32", "rates")),
        *(() if mixer.decay is not Decay.CHANNEL else _pointers("*i32", "parents")),
        *_known(plan, "ancestors"),
        *_where("*fp32", products=mixer.delta),
        *_pointers(_readout(plan), "readout"),
        *_where("*fp32", inverse=mixer.delta and not replay),
        *_pointers("*fp32", "scales"),
        *_reach(plan),
    )


def _rates(plan: TreePlan) -> tuple[Param, ...]:
    kept = plan.spec.mixer.decay in (Decay.CONSTANT, Decay.CHANNEL)
    return _pointers("*fp32", "rates") if kept else ()


def _reach(plan: TreePlan) -> tuple[Param, ...]:
    kind = "*bf16" if plan.reach_terms > 1 else "*fp32"
    return _pointers(kind, "reach") if plan.spec.mixer.decay is Decay.CHANNEL else ()


def _fold(plan: TreePlan) -> str:
    return plan.precision.fold or plan.precision.dot


def _readout(plan: TreePlan) -> str:
    return "*bf16" if plan.precision.readout_terms and plan.spec.mixer.delta else "*fp32"

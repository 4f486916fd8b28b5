"""Argument types of every kernel, for the ahead-of-time build; templates hold the same names."""

from bolegen.ir import Kernel, Param, TreePlan

__all__ = ["kernels_of"]


def kernels_of(plan: TreePlan, name: str) -> tuple[Kernel, ...]:
    """trace, prepare, factor, solve (alone, factor or a commit inside) and commit, in order."""
    tiling = plan.tiling
    kernels = [
        Kernel(f"trace_{name}", _trace(plan), 1, 1),
        Kernel(f"prepare_{name}", _prepare(plan), tiling.warps_prepare, 1),
        Kernel(f"factor_{name}", _factor(plan), tiling.warps_factor, 1),
        Kernel(f"solve_{name}", _solve(plan), tiling.warps_solve, tiling.stages, tiling.maxnreg),
        *_merged(plan, name),
        _folded(plan, name),
        Kernel(f"commit_{name}", _commit(plan), tiling.warps_commit, 1, tiling.maxnreg_commit),
    ]
    return tuple(kernels)


def _pointers(kind: str, *names: str) -> tuple[Param, ...]:
    return tuple(Param(name, kind) for name in names)


def _absent(*names: str) -> tuple[Param, ...]:
    return tuple(Param(name, "constexpr") for name in names)


def _constants(**values: object) -> tuple[Param, ...]:
    return tuple(Param(name, "constexpr", value) for name, value in values.items())


def _strides(*names: str) -> tuple[Param, ...]:
    return tuple(Param(f"stride_{name}", "i32") for name in names)


def _given(plan: TreePlan, kind: str, name: str) -> tuple[Param, ...]:
    """A buffer that only runtime topology has."""
    return _absent(name) if plan.tree.is_static else _pointers(kind, name)


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


def _prepare(plan: TreePlan) -> tuple[Param, ...]:
    x = plan.spec.dtype.pointer
    replay = plan.spec.factors == "replay"
    strides = ("qb", "qt", "qh", "kb", "kt", "kh", "vb", "vt", "vh")
    gate_strides = ("ab", "at", "ah", "bb", "bt", "bh")
    return (
        *_pointers(x, "q", "k", "v", "a", "b", "weight"),
        *_absent("bias"),
        *_pointers("*fp32", "A_log", "dt_bias"),
        *_pointers(x, "window"),
        *_pointers("*i64", "slots"),
        *_pointers("*i8", "live"),
        *_given(plan, "*i32", "parents"),
        *_absent("pending_nodes", "pending_live", "pending_parents", "pending_rows"),
        *_pointers(x, "qkv", "rows"),
        *(_pointers(x, "kept") if replay else _absent("kept")),
        *_pointers("*fp32", "gates"),
        *(_absent("keys") if replay else _pointers("*fp32", "keys")),
        *_pointers("*fp32", "vectors", "decays"),
        *_strides(*strides),
        *(Param(f"stride_{s}", "i32", aligned=False) for s in gate_strides),
        *_strides("slot"),
        *_constants(CONVOLVE=True, MASKED=not plan.tree.is_static),
        *_constants(TILES=1),
    )


def _factor(plan: TreePlan) -> tuple[Param, ...]:
    return (
        *_pointers(plan.spec.dtype.pointer, "qkv"),
        *_pointers("*i64", "slots"),
        *_pointers("*fp32", "vectors", "decays"),
        *_given(plan, "*i32", "ancestors"),
        *_pointers("*fp32", "products"),
        *_pointers(_readout(plan), "readout"),
        *_inverse(plan),
        *_pointers("*fp32", "scales"),
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
    """The solve that first commits the round before; it runs under commit's cap of registers."""
    tiling = plan.tiling
    return Kernel(
        f"solve_{name}",
        _solve(plan, folded=True),
        tiling.warps_solve,
        tiling.stages,
        tiling.maxnreg_commit,
        label="folded",
    )


def _pending(plan: TreePlan, folded: bool) -> tuple[Param, ...]:
    x, kinds = plan.spec.dtype.pointer, {"nodes": "*i64", "live": "*i8"}
    if not plan.tree.is_static:
        kinds["parents"] = "*i32"
    kinds |= {"rows": x, "gates": "*fp32"}
    kinds |= {"kept": x} if plan.spec.factors == "replay" else {"keys": "*fp32", "u": "*fp32"}
    names = ("nodes", "live", "parents", "rows", "kept", "gates", "keys", "u")
    kind = {name: kinds.get(name, "constexpr") if folded else "constexpr" for name in names}
    window = _pointers(x, "window") if folded else _absent("window")
    return (
        *(Param(f"pending_{name}", kind[name]) for name in names),
        *window,
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
        *_pointers("*fp32", "vectors", "decays"),
        *_given(plan, "*i32", "ancestors"),
        *_pointers("*fp32", "products"),
        *_pointers(_readout(plan), "readout"),
        *_inverse(plan),
        *_pointers("*fp32", "scales"),
        *(_absent("u") if replay else _pointers("*fp32", "u")),
        *_pointers(plan.spec.dtype.pointer, "out"),
        *_pending(plan, folded),
        *nodes,
        *_strides("slot", "ob", "ot", "oh"),
        *_constants(MERGED=merged, OVERLAP=False),
        *_constants(FOLD=_fold(plan) if merged else None, DOT=_dot(plan)),
    )


def _commit(plan: TreePlan) -> tuple[Param, ...]:
    x = plan.spec.dtype.pointer
    replay = plan.spec.factors == "replay"
    return (
        *_pointers(plan.spec.state_dtype.pointer, "state"),
        *_pointers(x, "window"),
        *_pointers("*i64", "slots", "nodes", "track_slots", "track_nodes"),
        *_pointers(x, "rows"),
        *(_pointers(x, "kept") if replay else _absent("kept")),
        *_pointers("*fp32", "gates"),
        *(_absent("keys", "u") if replay else _pointers("*fp32", "keys", "u")),
        *_pointers("*i8", "live"),
        *_given(plan, "*i32", "parents"),
        Param("capacity", "i32", aligned=False),
        *_strides("sl", "ss", "wl", "ws"),
        *_constants(CONVOLVED=False),
    )


def _dot(plan: TreePlan) -> str:
    hip = plan.target is not None and plan.target.backend == "hip"
    return plan.precision.hip_dot if hip else plan.precision.dot


def _fold(plan: TreePlan) -> str:
    return plan.precision.fold or _dot(plan)


def _readout(plan: TreePlan) -> str:
    return "*bf16" if plan.precision.readout_terms else "*fp32"


def _inverse(plan: TreePlan) -> tuple[Param, ...]:
    return _absent("inverse") if plan.spec.factors == "replay" else _pointers("*fp32", "inverse")

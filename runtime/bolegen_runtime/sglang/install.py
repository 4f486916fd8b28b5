"""Hooks into SGLang, all or none: its loader only logs what fails, so a guard looks again.

The guard stands before the scheduler is built, in the scheduler's own process, and raises there.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from bolegen_runtime.settings import Settings
from bolegen_runtime.sglang import hooks
from bolegen_runtime.sglang.errors import PluginError
from bolegen_runtime.sglang.flags import read_bounds
from bolegen_runtime.sglang.tiers import Tiers, read_tiers
from bolegen_runtime.sglang.versions import Release, find_release

__all__ = ["check_applied", "list_targets", "register"]

GUARD = "sglang.srt.managers.scheduler.Scheduler.__init__"
logger = logging.getLogger(__name__)
# target, hook, its kind, names that the method must take
Target = tuple[str, Callable[..., Any], str, tuple[str, ...]]


def register() -> None:
    """What SGLang calls in each of its processes: hooks where BOLEGEN_ENABLE=1, else nothing."""
    try:
        settings = Settings.from_env()
        if not settings.enable:
            return
        problem = _register_all(settings)
    except ValueError as error:
        problem = PluginError(str(error))
    _register_guard(problem)


def list_targets(release: Release, tiers: Tiers | None = None) -> tuple[Target, ...]:
    """Every hook of a release, and of trees by batch size."""
    attention = "sglang.srt.layers.attention"
    return (
        (
            f"{attention}.linear.gdn_backend.GDNAttnBackend.forward_extend",
            hooks.verify,
            "AROUND",
            ("layer", "forward_batch", "mixed_qkv", "a", "b"),
        ),
        (
            "sglang.srt.mem_cache.memory_pool.MambaPool.__init__",
            hooks.allocate,
            "AROUND",
            ("spec_state_size", "mamba_layer_ids", "device", "speculative_num_draft_tokens"),
        ),
        (release.sizing, hooks.size, "AROUND", ("total_rest_memory",)),
        (
            f"{attention}.hybrid_linear_attn_backend.HybridLinearAttnBackend"
            ".update_mamba_state_after_mtp_verify",
            hooks.commit,
            "AROUND",
            ("last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"),
        ),
        (
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            hooks.report,
            "AFTER",
            ("recv_req",),
        ),
        *(tiers.targets if tiers is not None else ()),
    )


def _register_all(settings: Settings) -> PluginError | None:
    """Register every hook, or none and say why."""
    try:
        release = find_release(importlib.import_module("sglang").__version__)
        tiers = read_tiers(settings.tiers, release)
        targets = list_targets(release, tiers)
        for path, _, _, names in targets:
            _expect_method(path, names)
    except PluginError as error:
        return error
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for path, hook, kind, _ in targets:
        registry.HookRegistry.register(path, hook, registry.HookType[kind])
    hooks.active.release, hooks.active.tiers = release, tiers
    hooks.active.chains = settings.chains
    return None


def _expect_method(path: str, names: tuple[str, ...]) -> None:
    """The method exists and takes these names."""
    try:
        found = inspect.signature(pkgutil.resolve_name(path)).parameters
    except (ImportError, AttributeError) as error:
        raise PluginError(f"SGLang has no {path}: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise PluginError(
            f"{path}: expected the arguments {', '.join(missing)}, got {list(found)}"
        )


def _register_guard(problem: PluginError | None) -> None:
    """Stand before the scheduler. Without a place for that, end the process: the loader would
    swallow any other exception and serve without the plugin.
    """

    def guard(*args: Any, **options: Any) -> None:
        check_scheduler(problem, options.get("server_args", args[1] if len(args) > 1 else None))

    try:
        pkgutil.resolve_name(GUARD)
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"bolegen: {problem or f'SGLang has no {GUARD}'} ({error})") from error
    registry.HookRegistry.register(GUARD, guard, registry.HookType.BEFORE)


def check_scheduler(problem: PluginError | None, server_args: Any) -> None:
    """Raise PluginError unless everything is in place; then take the server's bounds."""
    if problem is not None:
        raise problem
    release = hooks.active.release
    assert release is not None
    tiers = hooks.active.tiers
    targets = list_targets(release, tiers)
    missing = [path for path, hook, _, _ in targets if not check_applied(path, hook)]
    if missing:
        raise PluginError(
            f"hooks that SGLang did not install: {', '.join(missing)}; its log says why. Start "
            "without BOLEGEN_ENABLE=1 to serve without the plugin"
        )
    flags = _read_flags(release, server_args)
    said = tiers.tiers if tiers is not None else ()
    hooks.active.bounds = read_bounds(flags, said, ngram=release.ngram, chains=hooks.active.chains)
    if hooks.active.bounds is None:
        logger.warning(
            "bolegen has nothing to do: no speculation, or --speculative-eagle-topk 1 without "
            "BOLEGEN_CHAINS=1"
        )


def check_applied(path: str, hook: Callable[..., Any]) -> bool:
    """Whether the method is wrapped by the hook, by whomever else it is wrapped."""
    found: Any = pkgutil.resolve_name(path)
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def _read_flags(release: Release, server_args: Any) -> dict[str, Any]:
    """All flags as resolved."""
    if not release.published:
        return dict(vars(server_args))
    context = importlib.import_module("sglang.srt.runtime_context")
    flags: dict[str, Any] = context.get_context().resolved_server_args_dict()
    return flags

"""What the plugin touches of SGLang, in its names, signatures and layouts; no SGLang needed.

Facts of docs/sglang.md's releases; tests/engine/test_real_sglang.py holds the same calls to the
real classes wherever SGLang can be imported.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["Engine", "FakePool", "install_fakes", "make_params"]

Hook = tuple["HookType", Callable[..., Any]]


class HookType(Enum):
    """Kinds that the plugin uses."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    """Applies hooks as SGLang's does: wrapped one by one, failures swallowed."""

    hooks: dict[str, list[Hook]]  # a fresh one for each test

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        """Keep a hook until they are applied."""
        cls.hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply(cls, *, without: str = "") -> None:
        """Install every hook but those on targets that end with ``without``."""
        for target, hooks in cls.hooks.items():
            if without and target.endswith(without):
                continue
            path, name = target.rsplit(".", 1)
            module, _, owner = path.rpartition(".")
            holder = getattr(sys.modules[module], owner)
            for kind, hook in hooks:
                setattr(holder, name, _wrap(getattr(holder, name), hook, kind))


def _wrap(original: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            hook(*args, **kwargs)
            return original(*args, **kwargs)
        return hook(original(*args, **kwargs), *args, **kwargs)

    return wrapper


@dataclass(frozen=True, kw_only=True)
class State:
    """States and windows of all layers."""

    conv: list[torch.Tensor]
    temporal: torch.Tensor
    replayssm_d: torch.Tensor | None = None

    def at_layer_idx(self, layer: int) -> Any:
        """One layer's views."""
        return SimpleNamespace(conv=[c[layer] for c in self.conv], temporal=self.temporal[layer])


@dataclass(frozen=True, kw_only=True)
class SpeculativeState(State):
    """The same with what a node needs until acceptance."""

    intermediate_ssm: torch.Tensor | None
    intermediate_conv_window: list[torch.Tensor]


class FakePool:
    """MambaPool: conv [L, slots, C, W-1], temporal [L, slots, Hv, d_v, d_k]."""

    SpeculativeState = SpeculativeState

    def __init__(
        self,
        *,
        size: int,
        spec_state_size: int,
        cache_params: Any,
        mamba_layer_ids: list[int],
        device: str,
        speculative_num_draft_tokens: int | None = None,
        speculative_eagle_topk: int | None = None,
    ) -> None:
        layers, shape = len(mamba_layer_ids), cache_params.shape
        conv = [
            torch.zeros(layers, size + 1, *s, dtype=cache_params.dtype.conv) for s in shape.conv
        ]
        temporal = torch.zeros(
            layers, size + 1, *shape.temporal, dtype=cache_params.dtype.temporal
        )
        self.mem_usage = 0.0
        self.mamba_cache: Any = State(conv=conv, temporal=temporal)
        if speculative_num_draft_tokens is not None:
            kept = layers, spec_state_size + 1, speculative_num_draft_tokens
            self.mamba_cache = SpeculativeState(
                conv=conv,
                temporal=temporal,
                intermediate_ssm=torch.zeros(*kept, *shape.temporal),
                intermediate_conv_window=[torch.zeros(*kept, *shape.conv[0])],
            )


def make_params(
    heads: tuple[int, int],
    dims: tuple[int, int],
    layers: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
) -> Any:
    """mamba2_cache_params of a GDN model on one rank."""
    (key_heads, value_heads), (d_k, d_v) = heads, dims
    channels = 2 * key_heads * d_k + value_heads * d_v
    size = channels * 3 * dtype.itemsize + value_heads * d_v * d_k * state_dtype.itemsize
    return SimpleNamespace(
        layers=list(range(layers)),
        shape=SimpleNamespace(conv=[(channels, 3)], temporal=(value_heads, d_v, d_k)),
        dtype=SimpleNamespace(conv=dtype, temporal=state_dtype),
        mamba_cache_per_req=layers * size,
        is_kda=False,
    )


@dataclass
class Bag:
    """A part of SGLang's published configuration."""

    speculative_num_draft_tokens: float

    @contextmanager
    def override(self, **values: float) -> Iterator[None]:
        """Other values for a while."""
        kept = dict(vars(self))
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(kept)


@dataclass
class Engine:
    """The fake engine's configuration and what its own methods were called with."""

    version: str
    flags: dict[str, Any]
    spec: Bag = field(default_factory=lambda: Bag(0))
    calls: list[str] = field(default_factory=list)


def install_fakes(monkeypatch: pytest.MonkeyPatch, version: str, flags: dict[str, Any]) -> Engine:
    """Put a fake SGLang of this version into sys.modules, its loader not yet run."""
    engine = Engine(version, flags, Bag(flags.get("speculative_num_draft_tokens", 0)))

    class GDNAttnBackend:
        def forward_extend(
            self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
        ) -> str:
            engine.calls.append("forward_extend")
            return "the engine's"

    class HybridLinearAttnBackend:
        linear_attn_backend: Any

        def update_mamba_state_after_mtp_verify(
            self,
            last_correct_step_indices: Any,
            mamba_track_indices: Any,
            mamba_steps_to_track: Any,
            model: Any,
            req_pool_indices: Any = None,
        ) -> None:
            engine.calls.append("update_mamba_state_after_mtp_verify")

    class Configurator:
        server_args = SimpleNamespace(**flags)
        hybrid_gdn_config: Any = object()

        def _handle_max_mamba_cache(self, total_rest_memory: float) -> tuple[float, float]:
            here = self.server_args if version < "0.5.17" else engine.spec
            return total_rest_memory, here.speculative_num_draft_tokens

        handle_max_mamba_cache = _handle_max_mamba_cache

    class Scheduler:
        def __init__(self, server_args: Any, port_args: Any) -> None:
            engine.calls.append("Scheduler")

        def get_internal_state(self, recv_req: Any) -> Any:
            return SimpleNamespace(internal_state={})

    class MambaPool(FakePool):
        __init__ = FakePool.__init__

    class Algorithm:
        def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
            return 1 + int(server_args.speculative_num_steps)

    class Worker:
        def build_adaptive_runtime_state(
            self,
            speculative_num_steps: int,
            speculative_num_draft_tokens: int,
            cuda_graph_bs: list[int] | None = None,
        ) -> tuple[int, int, list[int] | None]:
            return speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs

    def adaptive_unsupported_reason(server_args: Any) -> str | None:
        if server_args.speculative_algorithm != "EAGLE":
            return f"speculative_algorithm={server_args.speculative_algorithm}"
        return "speculative_eagle_topk=4 (only topk=1 is supported)"

    def _load_adaptive_config(cfg_path: str | None) -> Any:
        raise AssertionError("the engine's own steps were asked for")

    def declare(server_args: Any, source: str, **fields: Any) -> None:
        vars(server_args).update(fields)

    def _init_adaptive_speculative_params(server_args: Any) -> None:
        steps = server_args.speculative_num_steps
        declare(server_args, "own", speculative_num_draft_tokens=steps + 1)

    context = SimpleNamespace(resolved_server_args_dict=lambda: dict(flags))
    held: dict[str, dict[str, Any]] = {
        "": {"__version__": version},
        "srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "srt.layers.attention.linear.gdn_backend": {"GDNAttnBackend": GDNAttnBackend},
        "srt.layers.attention.hybrid_linear_attn_backend": {
            "HybridLinearAttnBackend": HybridLinearAttnBackend
        },
        "srt.mem_cache.memory_pool": {"MambaPool": MambaPool},
        "srt.mem_cache.kv_cache_configurator": {"KVCacheConfigurator": Configurator},
        "srt.model_executor.model_runner": {"ModelRunner": Configurator},
        "srt.managers.scheduler": {"Scheduler": Scheduler},
        "srt.speculative.adaptive_spec_params": {
            "adaptive_unsupported_reason": adaptive_unsupported_reason,
            "_load_adaptive_config": _load_adaptive_config,
        },
        "srt.speculative.spec_info": {"SpeculativeAlgorithm": Algorithm},
        "srt.speculative.eagle_worker_v2": {"EAGLEWorkerV2": Worker},
        "srt.arg_groups.speculative_hook": {
            "_init_adaptive_speculative_params": _init_adaptive_speculative_params
        },
        "srt.arg_groups.overrides": {
            "resolving_view": lambda server_args: server_args,
            "declare_resolution": declare,
        },
        "srt.runtime_context": {"get_context": lambda: context, "get_spec": lambda: engine.spec},
    }
    HookRegistry.hooks = {}
    for path, names in held.items():
        _add_module(monkeypatch, path, names)
    return engine


def _add_module(monkeypatch: pytest.MonkeyPatch, path: str, names: dict[str, Any]) -> None:
    """One module and the packages above it."""
    parts = ["sglang", *filter(None, path.split("."))]
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if not isinstance(sys.modules.get(name), ModuleType) or (end == 1 and not path):
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(sys.modules[".".join(parts)]).update(names)

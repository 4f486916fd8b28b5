"""The hooks themselves: from the engine's objects to plain tensors, and nothing else.

Each gets the method that it stands for, and calls it wherever there is nothing to verify: for
chains unless asked, for the draft model, for prefill and decode. What they share is one Active.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bolegen_runtime.lifetimes import LayerWeights
from bolegen_runtime.sglang.errors import PluginError
from bolegen_runtime.sglang.flags import TreeBounds
from bolegen_runtime.sglang.layers import RoundSpec, read_spec
from bolegen_runtime.sglang.tiers import Tiers
from bolegen_runtime.sglang.verifier import Links, TreeVerifier, count_bytes
from bolegen_runtime.sglang.versions import Release

__all__ = ["Active", "allocate", "commit", "report", "size", "verify"]

GIB = 1 << 30
Method = Callable[..., Any]
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Active:
    """What this process serves: bounds by the flags, then specs by sizing, then verifiers by
    nodes; all of them the widest first.

    bounds None: no trees, and no chains that were asked for; every hook passes on.
    """

    release: Release | None = None
    chains: bool = False
    tiers: Tiers | None = None
    bounds: tuple[TreeBounds, ...] | None = None
    specs: tuple[RoundSpec, ...] = ()
    verifiers: dict[int, TreeVerifier] = dataclasses.field(default_factory=dict)


active = Active()


def size(original: Method, configurator: Any, total_rest_memory: float) -> Any:
    """Reserve a round's own bytes, in GiB, where SGLang would reserve a state for every node."""
    if active.bounds is None:
        return original(configurator, total_rest_memory)
    if configurator.hybrid_gdn_config is None or _has_side_states(configurator):
        raise PluginError(
            "the model: expected Gated DeltaNet layers (Qwen3.5, Qwen3-Next), got other linear "
            "attention; start without BOLEGEN_ENABLE=1"
        )
    params = configurator.mambaish_config.mamba2_cache_params
    dtype = configurator.model_config.dtype
    active.specs = tuple(
        read_spec(bounds, params, len(params.layers), dtype) for bounds in active.bounds
    )
    row, once = (sum(part) for part in zip(*map(count_bytes, active.specs), strict=True))
    if active.release is not None and active.release.padded:
        once -= row  # SGLang reserves a row for padding, which has none here
    # SGLang takes its own bytes of a request times this, for each request
    with _draft_tokens(configurator, row / params.mamba_cache_per_req):
        return original(configurator, total_rest_memory - once / GIB)


def _has_side_states(configurator: Any) -> bool:
    return bool(getattr(configurator, "extra_mamba_cache_bytes_per_req", 0))


@contextlib.contextmanager
def _draft_tokens(configurator: Any, value: float) -> Iterator[None]:
    """Another number of draft tokens for the length of one call."""
    if active.release is not None and active.release.published:
        from sglang.srt.runtime_context import get_spec

        with get_spec().override(speculative_num_draft_tokens=value):
            yield
        return
    args = configurator.server_args
    kept = args.speculative_num_draft_tokens
    object.__setattr__(args, "speculative_num_draft_tokens", value)
    try:
        yield
    finally:
        object.__setattr__(args, "speculative_num_draft_tokens", kept)


def allocate(original: Method, pool: Any, **options: Any) -> None:
    """Build the state pool without snapshots and windows, and give it a verifier."""
    nodes = options.get("speculative_num_draft_tokens")
    if active.bounds is None or nodes is None:
        original(pool, **options)
        return
    if not active.specs:
        raise PluginError("the state pool is built before its memory was sized; report this")
    spec, layers = active.specs[0], len(options["mamba_layer_ids"])
    if (nodes, layers) != (spec.bounds.nodes, spec.layers):
        raise PluginError(
            f"the state pool: expected {spec.bounds.nodes} nodes and {spec.layers} layers as "
            f"sized, got {nodes} and {layers}; leave out adaptive speculation"
        )
    original(pool, **{**options, "speculative_num_draft_tokens": None})
    requests = options["spec_state_size"]
    verifiers = {
        s.bounds.nodes: TreeVerifier(s, requests, options["device"]) for s in active.specs
    }
    factors = verifiers[spec.bounds.nodes].factors
    kept = {
        f.name: getattr(pool.mamba_cache, f.name) for f in dataclasses.fields(pool.mamba_cache)
    }
    windows = [factors.rows]
    pool.mamba_cache = pool.SpeculativeState(
        **kept, intermediate_ssm=factors.gates, intermediate_conv_window=windows
    )
    pool._intermediate_conv_window_phys = windows
    for verifier in verifiers.values():
        pool.mem_usage += verifier.bytes / GIB
        verifier.prewarm(_pools(pool))
        _say_memory(verifier)
    pool.bolegen_verifiers = active.verifiers = verifiers


def _say_memory(verifier: TreeVerifier) -> None:
    said = verifier.report()
    logger.warning(
        "bolegen verifies trees of %d nodes, depth %d, in %d layers: %.3f GB for %d requests in "
        "place of %.3f GB of snapshots and windows",
        said["nodes"], said["depth"], said["layers"], said["round_bytes"] / GIB,
        verifier.factors.batch, said["snapshot_bytes"] / GIB,
    )  # fmt: skip


def verify(
    original: Method,
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Score a layer's trees or chains, convolution included; all else is the engine's."""
    pool = backend.req_to_token_pool
    verifiers = _verifiers_of(pool)
    if not verifiers or not forward_batch.forward_mode.is_target_verify():
        out: torch.Tensor = original(backend, layer, forward_batch, mixed_qkv, a, b, **options)
        return out
    if layer.activation not in ("silu", "swish"):
        raise PluginError(f"layer {layer.layer_id}: expected SiLU, got {layer.activation}")
    metadata = backend.forward_metadata
    links: Links | None = metadata.retrieve_next_token, metadata.retrieve_next_sibling
    if any(verifier.spec.bounds.chain for verifier in verifiers.values()):
        links = None  # the engine tells none
    elif metadata.retrieve_next_token is None:  # a dummy run: nothing of it is read
        return mixed_qkv.new_zeros(1, len(mixed_qkv), layer.num_v_heads, layer.head_v_dim)
    verifier = _verifier_of(pool, metadata)
    cache = pool.mamba2_layer_cache(layer.layer_id)
    weights = LayerWeights(layer.conv_weights, layer.A_log, layer.dt_bias, layer.bias)
    return verifier.verify(
        pool.mamba_map[layer.layer_id], mixed_qkv, a, b, weights,
        (cache.temporal, cache.conv[0]), metadata.mamba_cache_indices, links,
    )  # fmt: skip


def commit(
    original: Method,
    backend: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    *args: Any,
    **options: Any,
) -> None:
    """Commit accepted paths from the factors, in place of SGLang's scatter of snapshots."""
    linear = backend.linear_attn_backend
    pool = linear.req_to_token_pool
    if not _verifiers_of(pool):
        original(
            backend, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track,
            *args, **options,
        )  # fmt: skip
        return
    metadata = linear.forward_metadata
    verifier = _verifier_of(pool, metadata)
    tracks: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        tracks = mamba_track_indices, mamba_steps_to_track
    verifier.commit(
        _pools(pool.mamba_pool), metadata.mamba_cache_indices, last_correct_step_indices, *tracks
    )


def report(result: Any, *args: Any, **options: Any) -> Any:
    """Add what was counted to the state that /server_info shows."""
    reports = [verifier.report() for verifier in active.verifiers.values()]
    if reports:
        narrower = {"narrower": reports[1:]} if reports[1:] else {}
        result.internal_state["bolegen"] = reports[0] | narrower
    return result


def _verifiers_of(pool: Any) -> dict[int, TreeVerifier]:
    """By nodes; only a pool that `allocate` built has them."""
    return getattr(pool.mamba_pool, "bolegen_verifiers", {})


def _verifier_of(pool: Any, metadata: Any) -> TreeVerifier:
    """The one whose trees this forward has."""
    verifiers = _verifiers_of(pool)
    if len(verifiers) == 1:
        return next(iter(verifiers.values()))
    return verifiers[metadata.retrieve_next_token.shape[1]]


def _pools(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.mamba_cache.temporal, pool.mamba_cache.conv[0]

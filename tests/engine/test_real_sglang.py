"""The plugin in the SGLang that is installed, without a GPU; skipped where there is none.

Its own registry, classes and configuration: hooks, flags, sizes, and rounds on its pool.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bolegen_runtime.sglang import PluginError, find_release, hooks, install, register
from bolegen_runtime.sglang.flags import TreeBounds
from support.sglang_fakes import make_params
from support.sglang_rounds import (
    CHAIN,
    DIMS,
    HEADS,
    NODES,
    STAR,
    TREE,
    Server,
    bounds_flags,
    chain_flags,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not there"),
    # its imports warn of what a machine without a GPU lacks
    pytest.mark.filterwarnings("ignore"),
]
GIB = 1 << 30


@pytest.fixture(scope="module")
def release() -> Any:
    return find_release(importlib.import_module("sglang").__version__)


@pytest.fixture
def config(release: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Hooks installed by SGLang's own registry, and its configuration published."""
    yield from configure(monkeypatch, bounds_flags())


@pytest.fixture
def chains(release: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The same of a server that verifies chains."""
    monkeypatch.setenv("BOLEGEN_CHAINS", "1")
    yield from configure(monkeypatch, chain_flags())


def configure(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]) -> Iterator[Any]:
    monkeypatch.setattr(hooks, "active", hooks.Active())
    monkeypatch.setenv("BOLEGEN_ENABLE", "1")
    monkeypatch.setenv("BOLEGEN_CHECKED", "1")
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", "off")
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    register()
    if not registry._patched:  # once a process, as in SGLang
        registry.apply_hooks()
    context = importlib.import_module("sglang.srt.runtime_context").get_context()
    with context.override_server_args(
        device="cuda", max_running_requests=5, disable_radix_cache=True, **flags
    ):
        yield context


def method(path: str) -> tuple[Any, str]:
    """A class of SGLang and the name of its method."""
    path, _, name = path.rpartition(".")
    module, _, owner = path.rpartition(".")
    return getattr(importlib.import_module(module), owner), name


def start(release: Any, **options: Any) -> Server:
    install.check_scheduler(None, None)
    verify, pool, _, after, _ = (path for path, *_ in install.list_targets(release))
    configurator = SimpleNamespace(hybrid_gdn_config=object())
    backends = method(verify)[0], method(after)[0]
    return Server.start(backends, method(pool)[0], configurator, **options)


def commit(server: Server, last: list[int], *tracks: torch.Tensor | None) -> None:
    both = tracks or (None, None)
    server.attention.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=torch.tensor(last),
        mamba_track_indices=both[0],
        mamba_steps_to_track=both[1],
        model=None,
    )


def test_its_registry_installs_every_hook_and_the_guard(release: Any, config: Any) -> None:
    assert all(
        install.check_applied(path, hook) for path, hook, _, _ in install.list_targets(release)
    )
    config.override("test", enable_memory_saver=True)
    scheduler, _ = method(install.GUARD)
    with pytest.raises(PluginError, match="--enable-memory-saver is True"):
        scheduler(server_args=None, port_args=None)


def test_its_resolved_flags_give_the_bounds(release: Any, config: Any) -> None:
    install.check_scheduler(None, None)
    assert hooks.active.bounds is not None
    assert hooks.active.bounds == (TreeBounds(NODES, 3),)


def test_rounds_on_its_pool_and_through_its_classes(release: Any, config: Any) -> None:
    server = start(release)
    for last, tracks in (([4, 5], [-1, 2]), ([0, 2], [0, -1])):
        server.plan([TREE, STAR], [5, 2], torch.int32)
        server.forward(2)
        commit(server, last, torch.tensor([6, 7]), torch.tensor(tracks))
    cache = server.pool.get_speculative_mamba2_params_all_layers()
    assert cache.intermediate_ssm.shape == (2, 3, NODES, 2, HEADS[1])
    assert server.pool.mamba2_layer_cache(1).temporal.shape == (8, HEADS[1], *DIMS)
    report = server.pool.bolegen_verifiers[NODES].report()
    assert report["bolegen_rounds_total"] == 2


def test_chains_through_its_classes(release: Any, chains: Any) -> None:
    server = start(release)
    assert hooks.active.bounds == (TreeBounds(NODES, NODES - 1, chain=True),)
    for last in ([4, NODES - 1], [0, 2]):
        server.plan([CHAIN, CHAIN], [5, 2], torch.int32)
        server.forward(2)
        commit(server, last)
    report = server.pool.bolegen_verifiers[NODES].report()
    assert report["module"].startswith(f"gdn_chain{NODES - 1}_")
    assert report["bolegen_rounds_total"] == 2


def test_its_sizing_reserves_what_the_pool_takes(release: Any, config: Any) -> None:
    install.check_scheduler(None, None)
    owner, name = method(release.sizing)
    params = make_params(HEADS, DIMS, 2)
    made = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        hybrid_gdn_config=object(),
        hybrid_kda_config=None,
        model_config=SimpleNamespace(dtype=torch.bfloat16, num_hidden_layers=4),
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        server_args=config.server_args,
        ps=SimpleNamespace(pp_size=1, attn_dp_size=1),
        pp_size=1,
        attn_dp_size=1,
        extra_mamba_cache_bytes_per_req=0,
        fused_entry_bytes=lambda kind: None,
    )
    left = getattr(owner, name)(made, 1.0)
    states = params.mamba_cache_per_req * (5 + 1)
    server = start(release, rows=5)
    verifier = server.pool.bolegen_verifiers[NODES]
    assert (1.0 - left) * GIB == pytest.approx(states + verifier.bytes, abs=64)

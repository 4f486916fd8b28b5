"""The ablation's middle step in the plugin, on pools and metadata in SGLang's layouts."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks.engine import snapshots
from bolegen_runtime.sglang import hooks, register
from engine.test_hooks import commit, found, start
from support.sglang_fakes import HookRegistry, install_fakes
from support.sglang_rounds import STAR, TREE, Server, bounds_flags


def serve(patch: pytest.MonkeyPatch) -> Server:
    """A server whose module is not checked: what is replaced lies below the checks."""
    patch.setattr(hooks, "active", hooks.Active())
    patch.setenv("BOLEGEN_ENABLE", "1")
    patch.setenv("BOLEGEN_CACHE_DIR", "off")
    engine = install_fakes(patch, "0.5.17", bounds_flags())
    register()
    HookRegistry.apply()
    found("managers.scheduler", "Scheduler")(SimpleNamespace(**engine.flags), None)
    return start()


def test_rounds_are_those_of_the_plugin_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    for stored in (False, True):
        with monkeypatch.context() as patch:
            if stored:
                keep_original(patch)
                snapshots.install()
            server = serve(patch)
            for last in ([4, 5, 0], [0, 0, 3]):
                server.plan([TREE, STAR, TREE], [5, 2, -1], torch.int32)
                server.forward(3)
                commit(server, last)
            verifier = next(iter(server.pool.bolegen_verifiers.values()))
            assert hasattr(verifier, "states") == stored
            pools.append(server.pool.mamba_cache)
    torch.testing.assert_close(pools[0].temporal, pools[1].temporal, rtol=1e-4, atol=1e-5)
    assert torch.equal(pools[0].conv[0], pools[1].conv[0])


def keep_original(patch: pytest.MonkeyPatch) -> None:
    """What install() replaces is put back afterwards."""
    layers = importlib.import_module("bolegen_runtime.sglang.layers")
    patch.setattr(layers, "load", layers.load)
    verifier = importlib.import_module("bolegen_runtime.sglang.verifier").TreeVerifier
    for name in ("__init__", "verify", "commit", "prewarm", "bytes"):
        patch.setattr(verifier, name, vars(verifier)[name])

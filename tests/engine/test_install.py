"""All hooks or none, off unless asked for, and never silently off."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bolegen_runtime.sglang import RELEASES, PluginError, hooks, register
from engine.test_flags import TREES
from support.sglang_fakes import Engine, HookRegistry, install_fakes

VERSIONS = [release.version for release in RELEASES]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "active", hooks.Active())
    monkeypatch.setenv("BOLEGEN_ENABLE", "1")


def start(engine: Engine) -> Any:
    """Build the scheduler, as SGLang does once plugins are loaded."""
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    return vars(scheduler)["Scheduler"](
        server_args=SimpleNamespace(**engine.flags), port_args=None
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_release_gets_every_hook(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = install_fakes(monkeypatch, version, TREES)
    register()
    HookRegistry.apply()
    start(engine)
    assert engine.calls == ["Scheduler"]
    assert hooks.active.bounds is not None
    assert len(HookRegistry.hooks) == 6


@pytest.mark.parametrize("said", ["", "0"])
def test_nothing_is_hooked_unless_asked_for(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLEGEN_ENABLE", said)
    install_fakes(monkeypatch, "0.5.23", TREES)
    register()
    assert not HookRegistry.hooks


@pytest.mark.parametrize(
    "missing",
    ["forward_extend", "MambaPool.__init__", "_handle_max_mamba_cache", "after_mtp_verify"],
)
def test_a_hook_that_the_engine_left_out_stops_the_scheduler(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install_fakes(monkeypatch, "0.5.23", TREES)
    register()
    HookRegistry.apply(without=missing)
    with pytest.raises(PluginError, match=f"did not install: .*{missing}"):
        start(engine)
    assert engine.calls == []


def test_a_release_outside_the_table_stops_the_scheduler_and_hooks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = install_fakes(monkeypatch, "0.6.0", TREES)
    register()
    assert [target.rpartition(".")[2] for target in HookRegistry.hooks] == ["__init__"]
    HookRegistry.apply()
    with pytest.raises(PluginError, match=r"expected 0\.5\.13 to 0\.5\.23, got 0\.6\.0"):
        start(engine)


def test_a_method_of_another_signature_stops_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = install_fakes(monkeypatch, "0.5.23", TREES)
    backend = vars(sys.modules["sglang.srt.layers.attention.linear.gdn_backend"])["GDNAttnBackend"]
    monkeypatch.setattr(backend, "forward_extend", lambda self, layer, batch: None)
    register()
    HookRegistry.apply()
    with pytest.raises(PluginError, match=r"forward_extend: expected the arguments forward_batch"):
        start(engine)


def test_a_switch_that_is_neither_on_nor_off_stops_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOLEGEN_ENABLE", "yes")
    engine = install_fakes(monkeypatch, "0.5.23", TREES)
    register()
    HookRegistry.apply()
    with pytest.raises(PluginError, match="BOLEGEN_ENABLE: expected 1 or 0, got 'yes'"):
        start(engine)


def test_without_a_scheduler_to_guard_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch, "0.5.23", TREES)
    monkeypatch.delattr(sys.modules["sglang.srt.managers.scheduler"], "Scheduler")
    with pytest.raises(SystemExit, match=r"bolegen: SGLang has no sglang\.srt\.managers"):
        register()


def test_a_refused_flag_stops_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = install_fakes(monkeypatch, "0.5.23", TREES | {"enable_unified_memory": True})
    register()
    HookRegistry.apply()
    with pytest.raises(PluginError, match="--enable-unified-memory"):
        start(engine)

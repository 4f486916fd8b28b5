"""Trees by batch size: what is said, what SGLang is told, and rounds of every width."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bolegen_runtime.sglang import PluginError, hooks, register
from bolegen_runtime.sglang.flags import TreeBounds, read_bounds
from bolegen_runtime.sglang.tiers import Tier, parse_tiers
from engine.test_flags import TREES
from engine.test_hooks import follow, found, start
from support.sglang_fakes import Engine, HookRegistry, install_fakes
from support.sglang_rounds import STAR, TREE, bounds_flags

SAID = "1:3x6 2:1x3 4:0"
FLAGS = bounds_flags() | {"speculative_adaptive": True}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(hooks, "active", hooks.Active())
    monkeypatch.setenv("BOLEGEN_ENABLE", "1")
    monkeypatch.setenv("BOLEGEN_TIERS", SAID)
    monkeypatch.setenv("BOLEGEN_CHECKED", "1")
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", "off")
    engine = install_fakes(monkeypatch, "0.5.23", FLAGS)
    register()
    HookRegistry.apply()
    return engine


def serve(engine: Engine) -> None:
    found("managers.scheduler", "Scheduler")(SimpleNamespace(**engine.flags), None)


def test_what_is_said() -> None:
    assert parse_tiers(SAID) == (Tier(1, 3, 6), Tier(2, 1, 3), Tier(4, 0, 1))
    assert parse_tiers("") == ()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("1:3", "BATCH:STEPSxNODES or BATCH:0, got '1:3'"),
        ("1:0x4", "steps from 1"),
        ("1:4x4", "steps from 1"),
        ("1:4x257", "2 to 256 nodes"),
        ("2:3x6", r"rise from 1, got \[2\]"),
        ("1:3x6 1:1x3", "rise from 1"),
        ("1:3x6 2:3x4", "each number of steps once"),
    ],
)
def test_what_is_said_wrongly_is_refused(said: str, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        parse_tiers(said)


def test_bounds_are_the_widest_first() -> None:
    flags = TREES | {"speculative_adaptive": True}
    found = read_bounds(flags, parse_tiers("1:4x16 2:5x16 8:0"))
    assert found == (TreeBounds(16, 5), TreeBounds(1, 0))
    with pytest.raises(PluginError, match=r"6 steps .* into 18 tokens' room, .* makes 16 before"):
        read_bounds(flags, parse_tiers("1:6x16 8:0"))
    # with pages each of the topk has two of its own at 4 steps, and from plain decoding it has one
    paged = flags | {"page_size": 8}
    with pytest.raises(PluginError, match=r"--page-size 8 draft into 48 .* makes 24"):
        read_bounds(paged, parse_tiers("1:4x16 8:0"))
    assert read_bounds(paged, parse_tiers("1:4x16 8:3x8")) == (TreeBounds(16, 4), TreeBounds(8, 3))
    with pytest.raises(PluginError, match="--speculative-adaptive"):
        read_bounds(TREES, parse_tiers("1:4x16"))
    with pytest.raises(PluginError, match="at most 22 nodes with --speculative-eagle-topk 3"):
        read_bounds(flags, parse_tiers("1:3x23"))
    assert read_bounds(flags, parse_tiers("1:3x22")) == (TreeBounds(22, 3),)
    with pytest.raises(PluginError, match="expected a server that verifies trees"):
        read_bounds(flags | {"speculative_eagle_topk": 1}, parse_tiers("1:4x16"))
    with pytest.raises(PluginError, match="leave out BOLEGEN_TIERS"):
        read_bounds(flags | {"speculative_algorithm": "NGRAM"}, parse_tiers("1:4x16"))


def test_the_engines_adaptive_steps_are_told(engine: Engine) -> None:
    args = SimpleNamespace(
        speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_num_draft_tokens=None
    )
    modules = (
        "sglang.srt.speculative.adaptive_spec_params",
        "sglang.srt.arg_groups.speculative_hook",
    )
    adaptive, flags = (vars(sys.modules[name]) for name in modules)
    assert adaptive["adaptive_unsupported_reason"](args) is None
    args.speculative_algorithm = "STANDALONE"
    assert "STANDALONE" in adaptive["adaptive_unsupported_reason"](args)
    _, slots = adaptive["_load_adaptive_config"](None)
    assert {batch: slot["candidate_steps"] for batch, slot in slots.items()} == {
        1: [3],
        2: [1],
        4: [0],
    }
    with pytest.raises(PluginError, match="--speculative-adaptive-config"):
        adaptive["_load_adaptive_config"]("steps.json")
    flags["_init_adaptive_speculative_params"](args)
    assert args.speculative_num_draft_tokens == 6
    algorithm = found("speculative.spec_info", "SpeculativeAlgorithm")()
    assert algorithm.resolve_max_speculative_num_draft_tokens(args) == 6
    worker = found("speculative.eagle_worker_v2", "EAGLEWorkerV2")()
    built = worker.build_adaptive_runtime_state(
        speculative_num_steps=1, speculative_num_draft_tokens=2, cuda_graph_bs=[2]
    )
    assert built == (1, 3, [2])


def test_rounds_of_every_width_follow_one_another(engine: Engine) -> None:
    serve(engine)
    server = start()
    assert list(server.pool.bolegen_verifiers) == [6, 3, 1]
    for trees, slots, last in (
        ([TREE, STAR], [5, 2], [4, 5]),
        ([[-1, 0, 0], [-1, 0, 7]], [5, 2], [2, 1]),
        ([[-1], [-1]], [2, 5], [0, 0]),
    ):
        follow(server, trees, slots, last, torch.int32)
    shown = found("managers.scheduler", "Scheduler").get_internal_state(None, None)
    shown = shown.internal_state["bolegen"]
    assert [shown["nodes"], *(v["nodes"] for v in shown["narrower"])] == [6, 3, 1]
    assert shown["bolegen_rounds_total"] == 1


def test_a_dummy_run_without_links_gives_zeros_whatever_its_width(engine: Engine) -> None:
    serve(engine)
    server = start()
    server.plan([TREE], [4], torch.int32)
    server.linear.forward_metadata.retrieve_next_token = None
    assert not any(out.any() for out in server.forward(1))


def test_a_hook_of_tiers_that_is_missing_stops_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "active", hooks.Active())
    monkeypatch.setenv("BOLEGEN_ENABLE", "1")
    monkeypatch.setenv("BOLEGEN_TIERS", SAID)
    engine = install_fakes(monkeypatch, "0.5.23", FLAGS)
    register()
    HookRegistry.apply(without="build_adaptive_runtime_state")
    with pytest.raises(PluginError, match=r"did not install: .*build_adaptive_runtime_state"):
        serve(engine)


def test_other_releases_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "active", hooks.Active())
    monkeypatch.setenv("BOLEGEN_ENABLE", "1")
    monkeypatch.setenv("BOLEGEN_TIERS", SAID)
    engine = install_fakes(monkeypatch, "0.5.17", FLAGS)
    register()
    HookRegistry.apply()
    with pytest.raises(PluginError, match=r"not served with SGLang 0\.5\.17"):
        serve(engine)

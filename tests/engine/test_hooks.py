"""The hooks on pools and metadata in SGLang's layouts: every call held to the recurrence.

BOLEGEN_CHECKED=1, so each verify and commit of the plugin runs beside the float64 recurrence.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bolegen_runtime.sglang import PluginError, find_release, hooks, register
from bolegen_runtime.sglang.verifier import count_bytes
from support.sglang_fakes import Engine, HookRegistry, install_fakes, make_params
from support.sglang_rounds import (
    CHAIN,
    DIMS,
    HEADS,
    NODES,
    STAR,
    TREE,
    Server,
    batch_of,
    bounds_flags,
    chain_flags,
)

GIB = 1 << 30


@pytest.fixture(params=["0.5.17"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return begin(monkeypatch, request.param, bounds_flags())


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("BOLEGEN_CHAINS", "1")
    return begin(monkeypatch, "0.5.23", chain_flags())


def begin(monkeypatch: pytest.MonkeyPatch, version: str, flags: dict[str, Any]) -> Engine:
    """A fake engine with the plugin, as far as its scheduler."""
    monkeypatch.setattr(hooks, "active", hooks.Active())
    monkeypatch.setenv("BOLEGEN_ENABLE", "1")
    monkeypatch.setenv("BOLEGEN_CHECKED", "1")
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", "off")
    engine = install_fakes(monkeypatch, version, flags)
    register()
    HookRegistry.apply()
    found("managers.scheduler", "Scheduler")(SimpleNamespace(**engine.flags), None)
    return engine


def found(module: str, name: str) -> Any:
    """A class of the fake engine."""
    return getattr(sys.modules[f"sglang.srt.{module}"], name)


def sizing(engine: Engine) -> tuple[Any, Any]:
    """What sizes the pools, and how it is asked to."""
    path, _, name = find_release(engine.version).sizing.rpartition(".")
    module, _, owner = path.removeprefix("sglang.srt.").rpartition(".")
    made = found(module, owner)()
    return made, getattr(made, name)


def start(**params: Any) -> Server:
    attention = "layers.attention"
    backends = (
        found(f"{attention}.linear.gdn_backend", "GDNAttnBackend"),
        found(f"{attention}.hybrid_linear_attn_backend", "HybridLinearAttnBackend"),
    )
    pool = found("mem_cache.memory_pool", "MambaPool")
    return Server.start(
        backends, pool, found("model_executor.model_runner", "ModelRunner")(), **params
    )


def commit(server: Server, last: list[int], *tracks: torch.Tensor | None) -> None:
    both = tracks or (None, None)
    server.attention.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=torch.tensor(last),
        mamba_track_indices=both[0],
        mamba_steps_to_track=both[1],
        model=None,
    )


def follow(
    server: Server,
    trees: list[list[int]],
    slots: list[int],
    last: list[int],
    dtype: torch.dtype,
    wide: int = 0,
) -> None:
    """A round of the server, and the same of the module itself: outputs, states, windows alike."""
    rows, nodes = len(trees), len(trees[0])
    module = server.pool.bolegen_verifiers[nodes].module
    server.plan(trees, slots, dtype)
    same = server.direct(trees, slots)
    factors = module.allocate(rows, 2, "cpu")
    out = server.forward(rows, wide=wide, nodes=nodes)
    for layer in range(2):
        want = same.verify(module, factors, layer)
        assert out[layer].shape == (1, rows * nodes, HEADS[1], DIMS[1])
        assert torch.equal(out[layer][0].view_as(want), want)
    same.commit(module, factors, last)
    commit(server, last)
    assert torch.equal(server.pool.mamba_cache.temporal, same.state)
    assert torch.equal(server.pool.mamba_cache.conv[0], same.conv_state)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.int32, torch.float32), (torch.int64, torch.bfloat16)],
    ids=["graph-fp32", "eager-bf16"],
)
def test_rounds_follow_the_recurrence_and_are_the_modules_own(
    engine: Any, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    server = start(state_dtype=state_dtype)
    for last in ([4, 5, 0], [0, 0, 3]):  # the second round starts from what the first committed
        follow(server, [TREE, STAR, TREE], [5, 2, -1], last, dtype, wide=7)


def test_chains_follow_the_recurrence_without_links(chains: Any) -> None:
    server = start()
    verifier = server.pool.bolegen_verifiers[NODES]
    assert verifier.module.MODULE.name.startswith(f"gdn_chain{NODES - 1}_")
    # in the second round a request is padded, in both one accepts all
    for slots, last in (([5, 2, 7], [4, NODES - 1, 0]), ([5, 2, -1], [0, 2, 3])):
        follow(server, [CHAIN, CHAIN, CHAIN], slots, last, torch.int32, wide=7)
    row, once = count_bytes(hooks.active.specs[0])
    assert verifier.bytes <= 3 * row + once
    # of two layers and four requests: SGLang's windows of a chain overlap, those of trees do not
    state, channels = 2 * 16 * 16 * 4, (2 + 2) * 16 * 2
    want = 2 * 4 * (NODES * state + (NODES + 4 - 2) * channels)
    assert verifier.report()["snapshot_bytes"] == want


def test_the_tracked_ancestor_is_written_beside_the_accepted_node(engine: Any) -> None:
    server = start()
    server.plan([TREE, STAR], [1, 3], torch.int32)
    server.forward(2)
    before = server.pool.mamba_cache.temporal.clone()
    # checked mode compares both slots; the second request crosses no boundary
    commit(server, [4, 2], torch.tensor([6, 7]), torch.tensor([1, -1]))
    now = server.pool.mamba_cache.temporal
    changed = [slot for slot in range(8) if not torch.equal(now[:, slot], before[:, slot])]
    assert changed == [1, 3, 6]


def test_a_commit_of_fewer_rows_than_the_graph_leaves_the_rest(engine: Any) -> None:
    server = start()
    # padded to three rows: stale links, no slot
    server.plan([TREE, STAR, STAR], [1, 3, -1], torch.int32)
    server.forward(3)
    before = server.pool.mamba_cache.temporal.clone()
    with torch.no_grad():
        verifier = server.pool.bolegen_verifiers[NODES]
        verifier.module = verifier.module._module
        commit(server, [4, 2])
    now = server.pool.mamba_cache.temporal
    changed = [slot for slot in range(8) if not torch.equal(now[:, slot], before[:, slot])]
    assert changed == [1, 3]


def test_links_of_a_capture_give_the_root_alone(engine: Any) -> None:
    server = start()
    server.plan([TREE], [4], torch.int32)
    server.linear.forward_metadata.retrieve_next_token.zero_()
    server.linear.forward_metadata.retrieve_next_sibling.zero_()
    out = server.forward(1)[0][0]
    assert out[0].any()
    assert not out[1:].any()


def test_a_dummy_run_without_links_gives_zeros(engine: Any) -> None:
    server = start()
    server.plan([TREE], [4], torch.int32)
    server.linear.forward_metadata.retrieve_next_token = None
    assert not any(out.any() for out in server.forward(1))


def test_what_is_no_tree_goes_to_the_engine(engine: Any) -> None:
    server = start()
    given = {"layer": None, "mixed_qkv": None, "a": None, "b": None}
    assert (
        server.linear.forward_extend(forward_batch=batch_of(target_verify=False), **given)
        == "the engine's"
    )
    server.pool.bolegen_verifiers = {}
    assert (
        server.linear.forward_extend(forward_batch=batch_of(target_verify=True), **given)
        == "the engine's"
    )
    commit(server, [0])
    assert engine.calls[-1] == "update_mamba_state_after_mtp_verify"


@pytest.mark.parametrize("engine", ["0.5.13", "0.5.16", "0.5.17"], indirect=True)
def test_sizing_reserves_what_the_pool_then_takes(engine: Any) -> None:
    configurator, size = sizing(engine)
    params = make_params(HEADS, DIMS, 2)
    configurator.mambaish_config = SimpleNamespace(mamba2_cache_params=params)
    configurator.model_config = SimpleNamespace(dtype=torch.bfloat16)
    rest, draft_tokens = size(3.0)
    server = start(rows=5)
    verifier = server.pool.bolegen_verifiers[NODES]
    # SGLang: bytes of a request, times requests and from 0.5.17 on a row for padding, times draft
    # tokens; some scratch of two requests is there for one
    release = hooks.active.release
    assert release is not None
    requests = 5 + release.padded
    reserved = params.mamba_cache_per_req * requests * draft_tokens + (3.0 - rest) * GIB
    row, once = count_bytes(hooks.active.specs[0])
    assert reserved == pytest.approx(5 * row + once, abs=1)
    assert -1 <= reserved - verifier.bytes < row
    assert engine.spec.speculative_num_draft_tokens == NODES
    assert configurator.server_args.speculative_num_draft_tokens == NODES


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_no_pool_takes_more_than_is_counted(engine: Any, rows: int) -> None:
    taken = start(rows=rows).pool.bolegen_verifiers[NODES].bytes
    row, once = count_bytes(hooks.active.specs[0])
    assert taken <= rows * row + once
    assert taken == rows * row + once or rows > 1


def test_rows_past_those_there_is_room_for_are_padding(engine: Any) -> None:
    server = start(rows=2)
    d = server.data
    x, a, b = (torch.cat([t, t[:, :1]], 1) for t in (d.x, d.a, d.b))
    server.data = replace(d, x=x, a=a, b=b)
    server.plan([TREE, STAR, STAR], [1, 3, 0], torch.int32)
    wide = server.forward(3)
    server.plan([TREE, STAR], [1, 3], torch.int32)
    for found, want in zip(wide, server.forward(2), strict=True):
        assert torch.equal(found[:, : 2 * NODES], want)
        assert not found[:, 2 * NODES :].any()
    commit(server, [4, 2])


def test_the_pool_holds_factors_in_place_of_snapshots(engine: Any) -> None:
    cache = start().pool.mamba_cache
    assert cache.intermediate_ssm.shape == (2, 3, NODES, 2, HEADS[1])
    assert cache.intermediate_conv_window[0].shape == (2, 3, NODES, 64)


def test_a_pool_for_drafts_is_the_engines_own(engine: Any) -> None:
    start()
    pool = found("mem_cache.memory_pool", "MambaPool")(
        size=2, spec_state_size=2, cache_params=make_params(HEADS, DIMS, 1), mamba_layer_ids=[0],
        device="cpu", speculative_num_draft_tokens=None,
    )  # fmt: skip
    assert not hasattr(pool, "bolegen_verifiers")


def test_other_mixers_are_refused(engine: Any) -> None:
    configurator, size = sizing(engine)
    configurator.hybrid_gdn_config = None
    with pytest.raises(PluginError, match="expected Gated DeltaNet layers"):
        size(1.0)


def test_server_info_shows_what_was_counted(engine: Any) -> None:
    server = start()
    server.plan([TREE, STAR], [1, 3], torch.int32)
    server.forward(2)
    commit(server, [4, 2])
    scheduler = found("managers.scheduler", "Scheduler")
    shown = scheduler.get_internal_state(None, None).internal_state["bolegen"]
    assert (shown["nodes"], shown["depth"], shown["layers"]) == (NODES, 3, 2)
    assert (shown["bolegen_rounds_total"], shown["bolegen_requests_total"]) == (1, 2)
    assert shown["bolegen_live_nodes_total"] == 5 + 6
    assert shown["bolegen_accepted_length_nodes"]["count"] == 2
    assert shown["snapshot_bytes"] == 2 * 4 * NODES * (2 * 16 * 16 * 4 + 3 * (2 + 2) * 16 * 2)

"""Planning on the device: no wait for it, the same in a graph, and what the processor plans."""
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bolegen_runtime import (
    CudaClock,
    Pass,
    ProfileError,
    Settings,
    cumulate,
    expect_tokens,
    load,
    load_profile,
    plan_fixed_width,
    plan_nodes,
    plan_per_request,
    profile_target,
)
from support.rounds import make_round

pytestmark = pytest.mark.gpu

SIZES = [(1, 40), (8, 64), (64, 256)]


def draw(rows: int, nodes: int, seed: int) -> dict[str, torch.Tensor]:
    """Every operand, on the processor; one row in four is padded, one score in ten is NaN."""
    gen = torch.Generator().manual_seed(seed)
    at = torch.arange(nodes)
    parents = (torch.rand(rows, nodes, generator=gen) * at).long().clamp(max=nodes - 1)
    parents[:, 0] = -1
    log_probs = torch.rand(rows, nodes, generator=gen).log()
    log_probs[torch.rand(rows, nodes, generator=gen) < 0.1] = float("nan")
    slots = torch.arange(rows)
    slots[1::4] = -1

    def integers(most: int) -> torch.Tensor:
        return torch.randint(0, most, (rows,), generator=gen)

    return {
        "log_probs": log_probs,
        "parents": parents.int(),
        "slots": slots,
        "total": torch.randint(0, rows * nodes // 2 + 2, (1,), generator=gen),
        "minimum": integers(4),
        "maximum": integers(nodes),
        "remaining": integers(12),
        "weight": torch.rand(rows, generator=gen),
        "required": 4 * torch.rand(rows, generator=gen),
    }


def plan(r: dict[str, torch.Tensor], *, weighted: bool = True) -> list[torch.Tensor]:
    """All plans of a batch."""
    scores, tree = cumulate(r["log_probs"], r["parents"]), r["parents"]
    slots, options = r["slots"], {k: r[k] for k in ("minimum", "maximum", "remaining")}
    if weighted:
        options["weight"] = r["weight"]
    live = plan_nodes(scores, tree, r["total"], slots=slots, **options)
    return [
        live,
        plan_fixed_width(scores, tree, 9, slots=slots),
        plan_per_request(scores, tree, r["total"], r["required"], slots=slots),
        expect_tokens(scores, tree, live),
    ]


def to_gpu(r: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in r.items()}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_would_be_seen() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").nonzero()


@pytest.mark.parametrize(("rows", "nodes"), SIZES)
def test_no_plan_waits_for_the_device(rows: int, nodes: int) -> None:
    r = to_gpu(draw(rows, nodes, 1))
    tree = tuple([-1, *range(nodes - 1)])
    plan_nodes(r["log_probs"], tree, 5)  # the first use of a tuple copies it
    torch.cuda.synchronize()
    with no_waiting():
        plan(r)
        plan_nodes(r["log_probs"], tree, 5, minimum=2, maximum=7, remaining=3)


@pytest.mark.parametrize(("rows", "nodes"), SIZES)
def test_the_device_plans_what_the_processor_does(rows: int, nodes: int) -> None:
    for seed in range(4):
        r = draw(rows, nodes, seed)
        # log differs in its last bit between devices
        r["log_probs"] = (r["log_probs"] * 64).round() / 64
        for mine, want in zip(plan(to_gpu(r), weighted=False)[:2], plan(r, weighted=False)[:2],
                              strict=True):  # fmt: skip
            assert torch.equal(mine.cpu(), want)
        assert plan(r)[0].any()


@pytest.mark.parametrize(("rows", "nodes"), SIZES)
def test_a_graph_plans_new_contents_and_allocates_nothing(rows: int, nodes: int) -> None:
    at = to_gpu(draw(rows, nodes, 0))
    plan(at)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan(at)
    contents = [to_gpu(draw(rows, nodes, seed)) for seed in range(1, 6)]
    wanted = [plan(r) for r in contents]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    planned: list[list[torch.Tensor]] = []
    for r in contents:
        for name, tensor in at.items():
            tensor.copy_(r[name])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 4 * len(planned)
        planned.append([tensor.clone() for tensor in out])
    for mine, want in zip(planned, wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, want, strict=True))


def test_verify_takes_a_plan() -> None:
    m = load("any:24", depth=8, settings=Settings())
    gen = torch.Generator().manual_seed(3)
    tree = [(node - 1) // 2 for node in range(24)]
    tree[0] = -1
    r = make_round(m, batch=3, layers=1, slots=4, seed=3, device="cuda", trees=[tree] * 3)
    r.slots[1] = -1
    log_probs = torch.rand(3, 24, generator=gen).log().cuda()
    assert r.parents is not None
    scores = cumulate(log_probs, r.parents)
    r.live = plan_nodes(scores, r.parents, 17, slots=r.slots)
    assert int(r.live.sum()) == 17
    out = r.verify(m, m.allocate(3, 1, "cuda"), 0)  # checks that live is closed
    lives = out.flatten(2).abs().sum(-1) > 0
    assert torch.equal(lives, r.live)


def busy(cycles: int) -> Callable[[], object]:
    return lambda: torch.cuda._sleep(cycles)


@pytest.mark.parametrize("graph", [True, False])
def test_the_clock_tells_long_from_short(graph: bool) -> None:
    clock = CudaClock(replays=9, graph=graph)
    short, long = (sorted(clock(busy(cycles)))[4] for cycles in (2_000_000, 8_000_000))
    assert 3 < long / short < 5


def test_a_profile_finds_a_knee_on_the_device_and_is_refused_elsewhere(tmp_path: Path) -> None:
    def prepare(target_pass: Pass) -> Callable[[], object]:
        return busy(500_000 * max(16, target_pass.nodes))

    made: Any = profile_target(
        prepare, batches=(1, 2), contexts=(8,), templates={"any:32": (1, 4, 8, 16, 32)}
    )
    assert [e.budget for e in made.entries] == [16, 16]
    made.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == made
    with pytest.raises(ProfileError, match="there and 'cpu' here"):
        load_profile(tmp_path / "profile.json", device="cpu")

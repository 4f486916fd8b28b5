"""Metrics count what happened, where it happened, and say it as Prometheus expects."""

import re
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import Metrics, Settings, expose_metrics, load
from bolegen_runtime.exposition import Family, Histogram, expose
from bolegen_runtime.metrics import NODES, SECONDS
from support.rounds import Round, make_round, poison

SMALL: dict[str, Any] = {"heads": (1, 1), "dims": (16, 16), "conv": 2, "dtype": "fp32"}
TREES = [[-1, 0, 1, 1, 3], [-1, 0, 0, 2, 2], [-1, 0, 1, 2, 3]]


@cache
def module(template: str = "(2,1)", **options: Any) -> ModuleType:
    return load(template, **SMALL, **options, settings=Settings())


def verified(m: ModuleType, **options: Any) -> tuple[Round, Any]:
    r = make_round(m, batch=3, slots=5, **options)
    r.slots[1] = -1
    r.live = torch.tensor([[True, True, True, True, False]] * 3)
    factors = poison(m.allocate(4, 1, "cpu"))
    r.verify(m, factors)
    return r, factors


def lengths(metrics: Metrics) -> list[int]:
    """How many requests had each accepted length."""
    found = list(metrics.snapshot()["bolegen_accepted_length_nodes"]["buckets"].values())
    return [after - before for before, after in zip([0, *found], found, strict=False)]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_round_is_counted_by_request(kind: torch.dtype) -> None:
    m = module()
    r, factors = verified(m)
    metrics = Metrics(m, "cpu")
    # node 3 hangs from node 1: three nodes; the second row is padded
    metrics.count_round(factors, r.slots.to(kind), torch.tensor([3, 4, 0], dtype=kind))
    seen = metrics.snapshot()
    assert seen["bolegen_rounds_total"] == 1
    assert seen["bolegen_requests_total"] == 2
    assert seen["bolegen_offered_nodes_total"] == 10
    assert seen["bolegen_live_nodes_total"] == 8
    assert lengths(metrics) == [0, 1, 0, 1, 0]
    assert seen["bolegen_accepted_length_nodes"]["sum"] == 4
    # nothing committed: none, out of range, dead
    for last in (-1, 5, 4):
        metrics.count_round(factors, r.slots, torch.tensor([last, 0, last]))
    assert lengths(metrics) == [6, 1, 0, 1, 0]
    assert metrics.snapshot()["bolegen_rounds_total"] == 4


def test_lengths_follow_a_topology_of_run_time() -> None:
    m = module("any:6", depth=4)
    r, factors = verified(m, trees=TREES, nodes=5)
    r.slots[1], r.live = 1, None
    r.verify(m, factors)
    metrics = Metrics(m, "cpu")
    metrics.count_round(factors, r.slots, torch.tensor([4, 3, 4]), nodes=5)
    assert lengths(metrics) == [0, 0, 0, 1, 1, 1, 0]
    assert metrics.snapshot()["bolegen_offered_nodes_total"] == 15
    assert metrics.snapshot()["bolegen_live_nodes_total"] == 15


def test_memory_that_was_never_written_is_bounded() -> None:
    m = module("any:6", depth=4)
    metrics = Metrics(m, "cpu")
    for fill in (-(2**31), -7, 6, 2**31 - 1):
        factors = m.allocate(2, 1, "cpu")
        factors.live.fill_(1)
        factors.parents.fill_(fill)
        metrics.count_round(factors, torch.tensor([0, 1]), torch.tensor([5, 2**40]))
    assert sum(lengths(metrics)) == 8


def test_an_empty_round_counts_nothing_and_a_wrong_one_is_refused() -> None:
    m = module()
    r, factors = verified(m)
    metrics = Metrics(m, "cpu")
    metrics.count_round(factors, r.slots[:0], r.slots[:0])
    assert metrics.snapshot()["bolegen_rounds_total"] == 0
    with pytest.raises(ValueError, match=r"last_node: expected shape \(3,\), got \(2,\)"):
        metrics.count_round(factors, r.slots, torch.tensor([0, 0]))
    many = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 4 rows"):
        metrics.count_round(factors, many, many)


def test_times_budgets_and_fallbacks() -> None:
    metrics = Metrics(module(), "cpu")
    with metrics.time("verify"):
        pass
    for nodes in (1, 40, 10**6):
        metrics.count_budget(nodes)
    metrics.count_fallback("plain decoding is faster")
    metrics.count_fallback("plain decoding is faster")
    metrics.count_fallback("no graph")
    seen = metrics.snapshot()
    assert seen["bolegen_verify_seconds"]["count"] == 1
    assert 0 < seen["bolegen_verify_seconds"]["sum"] < 10
    assert seen["bolegen_commit_seconds"]["count"] == 0
    budget = seen["bolegen_budget_nodes"]
    assert (budget["count"], budget["sum"]) == (3, 1_000_041)
    assert [budget["buckets"][n] for n in (1, 32, 64, 8192)] == [1, 1, 2, 2]
    assert seen["bolegen_fallbacks_total"] == {"plain decoding is faster": 2, "no graph": 1}


class Event:
    """An event of the device that is finished when told so."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.done = False

    def record(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: "Event") -> float:
        return 3.0


def test_times_of_the_device_are_taken_when_finished_and_events_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bolegen_runtime.metrics._event", Event)
    monkeypatch.setattr("bolegen_runtime.metrics.PENDING", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    metrics = Metrics(module(), "cpu")
    metrics._device = torch.device("cuda")
    for _ in range(2):
        with metrics.time("commit"):
            pass
    assert metrics.snapshot()["bolegen_commit_seconds"]["count"] == 0
    for _, start, end in metrics._pending:
        start.done = end.done = True
    seen = metrics.snapshot()["bolegen_commit_seconds"]
    assert (seen["count"], seen["buckets"][2e-3], seen["buckets"][5e-3]) == (2, 0, 2)
    made = Event.made
    for _ in range(5):
        with metrics.time("verify"):
            pass
    assert Event.made - made <= 6
    assert metrics.snapshot()["bolegen_dropped_timings_total"] == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside of a capture"), metrics.time("verify"):
        pass


SAMPLE = re.compile(
    r'(?P<name>[a-z_]+)\{(?P<labels>([a-z]+="([^"\\\n]|\\[\\n"])*",?)+)\} (?P<value>\S+)'
)


def test_the_exposition_is_prometheus_text() -> None:
    one, other = Metrics(module(), "cpu"), Metrics(module("any:6", depth=4), "cpu")
    one.count_fallback('a "quoted\\ reason"\nof two lines')
    with one.time("verify"):
        pass
    text = expose_metrics(one, other)
    assert text.endswith("\n")
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert len(kinds) == text.count("# TYPE") == text.count("# HELP")
    assert all(name.startswith("bolegen_") for name in kinds)
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    assert all(name.split("_")[-1] in ("total", "seconds", "nodes") for name in kinds)
    seen = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        float(found["value"])
        seen.append((found["name"], found["labels"]))
    assert len(seen) == len(set(seen))
    assert r'reason="a \"quoted\\ reason\"\nof two lines"} 1' in text
    for metrics in (one, other):
        labels = f'{{module="{metrics.labels["module"]}",device="cpu"}}'
        assert f"bolegen_rounds_total{labels} 0" in text


def test_buckets_are_cumulative_and_end_in_all() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 99):
        histogram.add(value)
    text = expose([({"module": "m"}, [Family("x_nodes", "Help.", histogram.read())])])
    assert text.splitlines() == [
        "# HELP x_nodes Help.",
        "# TYPE x_nodes histogram",
        'x_nodes_bucket{module="m",le="1"} 2',
        'x_nodes_bucket{module="m",le="2.5"} 3',
        'x_nodes_bucket{module="m",le="+Inf"} 4',
        'x_nodes_sum{module="m"} 102.5',
        'x_nodes_count{module="m"} 4',
    ]
    assert list(SECONDS) == sorted(SECONDS)
    assert list(NODES) == sorted(NODES)

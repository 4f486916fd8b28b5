"""The profiler finds the knee through noise; its file is refused wherever it does not hold."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bolegen_runtime import (
    CudaClock,
    Pass,
    Profile,
    ProfileEntry,
    ProfileError,
    compare_with_decode,
    load_profile,
    profile_target,
)
from bolegen_runtime.budget.profile import fit_ascending

WIDTHS = (1, 2, 4, 8, 16, 32)


class FakeGpu:
    """A target whose passes cost what a roofline says, and the clock that reads it off."""

    def __init__(self, *, knee: int, noise: float = 0.0) -> None:
        self.knee, self.noise = knee, noise
        self.random = random.Random(5)
        self.seen: list[Pass] = []

    def prepare(self, target_pass: Pass) -> Callable[[], object]:
        self.seen.append(target_pass)
        return lambda: target_pass

    def clock(self, run: Callable[[], object]) -> list[float]:
        target_pass = run()
        assert isinstance(target_pass, Pass)
        cost = 5.0 * max(1.0, target_pass.nodes / self.knee) + target_pass.context * 1e-4
        return [cost * (1 + self.noise * self.random.uniform(-1, 1)) for _ in range(5)]

    def profile(self, **changes: Any) -> Profile:
        arguments: dict[str, Any] = {
            "batches": (1, 4),
            "contexts": (100, 1000),
            "templates": {"any:32": WIDTHS},
            "clock": self.clock,
            "device": "cpu",
        }
        return profile_target(self.prepare, **(arguments | changes))


@pytest.mark.parametrize(("knee", "batch", "budget"), [(16, 1, 16), (16, 4, 16), (70, 4, 64)])
def test_the_budget_is_the_knee(knee: int, batch: int, budget: int) -> None:
    entry = FakeGpu(knee=knee).profile(epsilon=0.1).find(batch, 100, "any:32")
    assert entry.budget == budget
    assert entry.is_knee
    assert entry.cost_ms(budget) <= entry.limit_ms < entry.cost_ms(2 * budget)


def test_noise_does_not_hide_the_knee() -> None:
    entry = FakeGpu(knee=16, noise=0.04).profile().find(4, 1000, "any:32")
    assert entry.median_ms != entry.fitted_ms
    assert entry.budget == 16


def test_one_slow_measurement_among_fast_ones_does_not_cut_the_budget() -> None:
    fitted = entry_of((1.0, 1.01, 1.18, 1.02, 1.0, 3.0)).fitted_ms
    assert fitted[:5] == pytest.approx((1.0, 1.01, 3.2 / 3, 3.2 / 3, 3.2 / 3))
    assert entry_of((1.0, 1.01, 1.18, 1.02, 1.0, 3.0)).budget == 16


def test_where_nothing_fits_the_budget_is_nothing() -> None:
    entry = entry_of((1.2, 1.3, 1.4, 1.5, 1.6, 1.7))
    assert (entry.budget, entry.is_knee) == (0, True)


def test_where_everything_fits_there_is_no_knee() -> None:
    entry = entry_of((1.0,) * 6)
    assert (entry.budget, entry.is_knee) == (32, False)


def entry_of(median_ms: tuple[float, ...], epsilon: float = 0.1) -> ProfileEntry:
    return ProfileEntry(1, 100, "any:32", epsilon, 1.0, WIDTHS, median_ms, median_ms, median_ms)


def test_every_bucket_is_measured_and_decode_before_and_after() -> None:
    gpu, shown = FakeGpu(knee=8), []

    def progress(buckets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        shown.extend(buckets)
        return buckets

    gpu.profile(templates={"any:32": (1, 2), "chain:3": (4,)}, progress=progress)
    assert shown == [(1, 100), (1, 1000), (4, 100), (4, 1000)]
    assert [(p.template, p.nodes) for p in gpu.seen if (p.batch, p.context) == (4, 100)] == [
        (None, 4), ("any:32", 4), ("any:32", 8), ("chain:3", 16), (None, 4)
    ]  # fmt: skip


def test_sizes_and_times_may_be_any_numbers() -> None:
    gpu = FakeGpu(knee=8)
    sizes = {"batches": list(np.array([4, 1])), "contexts": [np.int64(100)]}
    found = gpu.profile(**sizes, clock=lambda run: list(np.array(gpu.clock(run))))
    assert found.entries == FakeGpu(knee=8).profile(contexts=(100,)).entries
    with pytest.raises(ValueError, match="clock: expected milliseconds of each run, got none"):
        gpu.profile(clock=lambda run: [])


@pytest.mark.parametrize(
    "changes",
    [{"batches": ()}, {"templates": {}}, {"contexts": (0,)}, {"templates": {7: (1,)}}],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    gpu = FakeGpu(knee=8)
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected"):
        gpu.profile(**changes)
    assert not gpu.seen  # before anything was measured
    with pytest.raises(
        ValueError, match="replays: expected a whole number from 1 to 1000000, got 0"
    ):
        CudaClock(replays=0)
    with pytest.raises(ValueError, match="run: expected a function without arguments, got 3"):
        CudaClock()(3)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 50).map(float), min_size=1, max_size=7))
def test_the_fit_ascends_and_is_the_nearest_that_does(values: list[float]) -> None:
    fitted = fit_ascending(values)
    assert list(fitted) == sorted(fitted)
    assert sum(fitted) == pytest.approx(sum(values))
    # the conditions of optimality of isotonic regression, on partial sums
    gaps = [sum(values[: i + 1]) - sum(fitted[: i + 1]) for i in range(len(values))]
    assert min(gaps) > -1e-9
    for i, (low, high) in enumerate(itertools.pairwise(fitted)):
        assert low == high or gaps[i] == pytest.approx(0, abs=1e-9)


def test_buckets_are_rounded_up() -> None:
    profile = FakeGpu(knee=8).profile()
    assert profile.find(2, 101, "any:32") == profile.find(4, 1000, "any:32")
    with pytest.raises(ProfileError, match=r"no bucket holds batch 5, .*; have 1 x 100 any:32,"):
        profile.find(5, 1, "any:32")
    with pytest.raises(ProfileError, match="chain:8; have"):
        profile.find(1, 1, "chain:8")


def test_costs_lie_between_their_neighbours() -> None:
    entry = entry_of((1.0, 1.0, 2.0, 2.0, 4.0, 8.0))
    assert [entry.cost_ms(n) for n in (0, 1, 3, 6, 12, 32)] == [1.0, 1.0, 1.5, 2.0, 3.0, 8.0]
    with pytest.raises(ProfileError, match=r"33 nodes of batch 1, .* at most 32 were measured"):
        entry.cost_ms(33)


def saved(folder: Path) -> tuple[Path, Profile]:
    profile = FakeGpu(knee=16, noise=0.02).profile(target={"model": "tiny", "module": "ab12"})
    profile.save(folder / "profile.json")
    return folder / "profile.json", profile


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path, profile = saved(tmp_path)
    assert load_profile(path, device="cpu") == profile
    assert load_profile(path, device="cpu", target={"model": "tiny", "module": "ab12"}) == profile
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]
    # small and readable: one line an entry
    lines = path.read_text().splitlines()
    assert sum('"batch"' in line for line in lines) == 4


def test_another_device_version_or_target_is_named(tmp_path: Path) -> None:
    path, profile = saved(tmp_path)
    elsewhere = replace(profile.environment, device="NVIDIA B200", torch_version="3.1")
    replace(profile, environment=elsewhere).save(path)
    with pytest.raises(ProfileError, match=r"device 'NVIDIA B200' there and 'cpu' here; torch"):
        load_profile(path, device="cpu")
    profile.save(path)
    with pytest.raises(ProfileError, match=r"module 'ab12' there and 'cd34' here\. Profile"):
        load_profile(path, device="cpu", target={"model": "tiny", "module": "cd34"})


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    whole = path.read_bytes().rstrip()
    for end in range(0, len(whole), 13):
        path.write_bytes(whole[:end])
        with pytest.raises(ProfileError, match="truncated, or no JSON"):
            load_profile(path, device="cpu")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("budget", 9999, "its budget does not follow"),
        ("decode_ms", 0.0, "expected ascending totals and a time above 0"),
        ("decode_ms", "fast", "expected int or float, got 'fast'"),
        ("decode_ms", float("nan"), "a time above 0"),
        ("totals", [1, 2, 4, 8, 16, 8], "expected ascending totals"),
        ("totals", [1], "expected ascending totals"),
        ("median_ms", None, "not what was saved"),
        ("batch", True, "expected int, got True"),
        ("epsilon", -0.1, "expected ascending"),
        ("more", 1, "unknown more"),
    ],
)
def test_a_changed_entry_is_refused(tmp_path: Path, name: str, value: Any, said: str) -> None:
    path, _ = saved(tmp_path)
    found = json.loads(path.read_text())
    found["entries"][0][name] = value
    path.write_text(json.dumps(found))
    with pytest.raises(ProfileError, match=said):
        load_profile(path, device="cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "no profile in the format"),
        ('{"format": "other 2"}', "no profile in the format 'bolegen-budget 1'"),
        ('{"format": "bolegen-budget 1"}', "not what was saved"),
        ('{"format": "bolegen-budget 1", "environment": 3}', "not what was saved"),
        ("\x00\x01", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=said):
        load_profile(path, device="cpu")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"gone\.json: cannot be read"):
        load_profile(tmp_path / "gone.json", device="cpu")


def test_trees_win_where_they_give_more_tokens_a_millisecond() -> None:
    entry = ProfileEntry(4, 100, "t", 0.1, 10.0, (4, 16), (10.0, 12.0), (1.0, 1.0), (99.0, 99.0))
    good = compare_with_decode(entry, rows=4, nodes=16, expected=8.0)
    assert (good.speculate, good.tree_rate, good.plain_rate) == (True, 8 / 12, 0.4)
    assert "8.00 tokens by trees at 0.667 a ms, 4 plainly at 0.400" in good.reason
    # drafting takes time too
    assert not compare_with_decode(entry, rows=4, nodes=16, expected=8.0, overhead_ms=8).speculate
    # equal rates
    assert not compare_with_decode(entry, rows=4, nodes=16, expected=4.8).speculate
    assert compare_with_decode(entry, rows=4, nodes=16, expected=4.8001).speculate


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"nodes": 3},
        {"expected": float("nan")},
        {"expected": 3.9},
        {"expected": 17.0},
        {"overhead_ms": -1.0},
        {"overhead_ms": float("inf")},
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    entry = ProfileEntry(4, 100, "t", 0.1, 10.0, (4, 16), (10.0, 12.0), (1.0, 1.0), (99.0, 99.0))
    arguments: dict[str, Any] = {"rows": 4, "nodes": 16, "expected": 8.0}
    with pytest.raises(ValueError, match="expected"):
        compare_with_decode(entry, **(arguments | changes))

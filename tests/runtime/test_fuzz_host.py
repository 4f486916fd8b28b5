"""Calls without kernels: an error that names it, or the right answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bolegen.codegen import plan_template
from bolegen.ir import LayerSpec
from bolegen.memory import plan_memory
from bolegen_runtime import (
    Pass,
    Profile,
    ProfileEntry,
    Settings,
    compare_with_decode,
    load,
    profile_target,
)
from bolegen_runtime.budget import Environment
from support.spoils import Scene, attack, spoiled

PAIRS = 40
SPEC = LayerSpec(key_heads=1, value_heads=1, d_k=16, d_v=16)
ENTRY = ProfileEntry(4, 100, "t", 0.1, 10.0, (4, 16), (10.0, 12.0), (9.0, 9.0), (11.0, 19.0))


def by_compare() -> Scene:
    given = {"entry": ENTRY, "rows": 2, "nodes": 8, "expected": 3.0, "overhead_ms": 1.0}
    fine = {
        "rows": lambda v: v == 2, "nodes": lambda v: type(v) is int,
        "overhead_ms": lambda v: type(v) in (int, float), "expected": lambda v: v == 2.5,
    }  # fmt: skip
    return Scene(compare_with_decode, given, fine=fine)


def by_entry() -> Scene:
    fine = {"template": lambda v: isinstance(v, str), "epsilon": lambda v: type(v) is float,
            "decode_ms": lambda v: type(v) is float, "batch": lambda v: v == 10**400,
            "context": lambda v: v == 10**400}  # fmt: skip
    says = ("entry", "expected")
    return Scene(lambda **of: ProfileEntry(**of).budget, dict(vars(ENTRY)), fine=fine, says=says)


def by_cost() -> Scene:
    def call(total: Any, batch: Any, context: Any) -> Any:
        profile = Profile(Environment("cpu", "", "", ""), {}, (ENTRY,))
        return profile.find(batch, context, "t").cost_ms(total)

    return Scene(call, {"total": 8, "batch": 2, "context": 30}, says=("nodes",))


def by_profile() -> Scene:
    seen: list[int] = []

    def clock(run: Any) -> list[float]:
        seen.append(1)
        return [1.0]

    def prepare(of: Pass) -> Callable[[], object]:
        return lambda: of

    given = {"batches": (1,), "contexts": (10,), "templates": {"t": (1, 2)},
             "epsilon": 0.5, "target": {"model": "tiny"}, "device": "cpu"}  # fmt: skip
    fine = {"target": lambda v: not v, "epsilon": lambda v: type(v) is float,
            "device": lambda v: v is None}  # fmt: skip
    return Scene(
        lambda **of: profile_target(prepare, clock=clock, **of), given, (seen,), fine=fine
    )


def by_request() -> Scene:
    given = {
        "template": "(2)", "depth": 1, "heads": (1, 1), "dims": (16, 16), "conv": 4,
        "dtype": "bf16", "state_dtype": "fp32", "factors": "replay", "contract": "fp32",
        "solver": None, "mixer": "gdn", "settings": Settings(),
    }  # fmt: skip
    fine = dict.fromkeys(("depth", "solver", "settings"), lambda v: v is None)
    says = ("template", "layout", "convolution", "tree", "read")
    return Scene(lambda **of: load(**of).MODULE, given, fine=fine, says=says)


def by_settings() -> Scene:
    given = {"cache_dir": Path("a"), "generated_dir": None, "checked": False}
    path: Callable[[Any], bool] = lambda v: v is None or isinstance(v, str)  # noqa: E731
    fine = {"cache_dir": path, "generated_dir": path, "checked": lambda v: v is True}
    return Scene(lambda **of: vars(Settings(**of)), given, fine=fine)


def by_memory() -> Scene:
    def call(memory_bytes: Any, **of: Any) -> Any:
        memory = plan_memory(**of)
        return memory.count_requests(memory_bytes), memory.factors.total

    given = {"plan": plan_template("(2)", SPEC), "layers": 2, "batch": 3, "memory_bytes": 10**9}
    return Scene(call, given, fine={"memory_bytes": lambda v: type(v) is int})


HOST: dict[str, Callable[[], Scene]] = {
    "compare": by_compare, "entry": by_entry, "cost": by_cost, "profile": by_profile,
    "request": by_request, "settings": by_settings, "memory": by_memory,
}  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_spoiled_numbers_and_words_are_named(name: str) -> None:
    make = HOST[name]
    assert any([attack(make, how) for how in spoiled(make(), PAIRS)])

"""Right calls of the planner and its baselines, to be spoiled, on any device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bolegen_runtime import (
    close_scores,
    cumulate,
    expect_tokens,
    plan_fixed_width,
    plan_nodes,
    plan_per_request,
)
from support.spoils import Arguments, Scene

__all__ = ["PLAN_SCENES"]


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


PLANS: dict[str, Callable[..., Any]] = {
    "plan_nodes": plan_nodes, "plan_fixed_width": plan_fixed_width, "cumulate": cumulate,
    "plan_per_request": plan_per_request, "close_scores": close_scores,
    "expect_tokens": expect_tokens,
}  # fmt: skip


def by_plan(device: str, name: str, in_host: bool = False) -> Scene:
    slots, live = torch.tensor([2, 0]), torch.tensor([[True, True, True], [True, True, False]])
    slots, live = slots.to(device), live.to(device)
    scores = torch.tensor([[0, -0.5, -1.5], [0, -0.25, -2.0]], device=device)
    parents: Any = (-1, 0, 1) if in_host else ints([[-1, 0, 0], [-1, 0, 1]], device=device)
    rows = {"slots": slots, "remaining": 2 if in_host else ints([2, 1], device=device)}
    two = 2 if in_host else ints([2, 1], device=device)
    worth = torch.tensor([1.0, 0.5], device=device)
    more: dict[str, Arguments] = {
        "plan_nodes": {"total": 3 if in_host else ints([3], device=device), "minimum": two,
                       "maximum": two, "weight": worth, **rows},
        "plan_fixed_width": {"width": two, **rows},
        "plan_per_request": {"total": 3, "required": worth + 1, "limit": 2, **rows},
        "expect_tokens": {"live": live},
    }  # fmt: skip
    given = {"log_probs" if name == "cumulate" else "scores": scores, "parents": parents}
    given |= more.get(name, {})
    whole = ("total", "width", "minimum", "maximum", "remaining", "limit")
    fine: dict[str, Callable[[Any], bool]] = {
        each: lambda v: v is None or type(v) is int for each in whole
    }
    fine |= {"width": lambda v: type(v) is int}
    fine |= {"total": lambda v: type(v) is int or isinstance(v, torch.Tensor)}
    return Scene(PLANS[name], given, fine=fine, axes=("parents", "total"))


PLAN_SCENES: dict[str, Callable[[str], Scene]] = {
    name: partial(by_plan, name=name) for name in PLANS
}
PLAN_SCENES |= {
    f"{name} in host": partial(by_plan, name=name, in_host=True)
    for name in ("plan_nodes", "plan_fixed_width", "plan_per_request")
}

"""How many nodes a round verifies, and which: profile, plan, or plain decoding."""

from bolegen_runtime.budget.baselines import plan_fixed_width, plan_per_request
from bolegen_runtime.budget.fallback import Comparison, compare_with_decode
from bolegen_runtime.budget.planner import close_scores, cumulate, expect_tokens, plan_nodes
from bolegen_runtime.budget.profile import (
    Environment,
    Profile,
    ProfileEntry,
    ProfileError,
    load_profile,
)
from bolegen_runtime.budget.profiler import Clock, CudaClock, Pass, profile_target

__all__ = [
    "Clock",
    "Comparison",
    "CudaClock",
    "Environment",
    "Pass",
    "Profile",
    "ProfileEntry",
    "ProfileError",
    "close_scores",
    "compare_with_decode",
    "cumulate",
    "expect_tokens",
    "load_profile",
    "plan_fixed_width",
    "plan_nodes",
    "plan_per_request",
    "profile_target",
]

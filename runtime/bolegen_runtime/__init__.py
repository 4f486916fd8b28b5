"""What a server imports: generated modules by template and shapes, CUDA graphs, node budgets.

Needs torch and triton alone; the compiler is loaded only when a module must be compiled.
"""

from bolegen_runtime.budget import (
    Clock,
    Comparison,
    CudaClock,
    Environment,
    Pass,
    Profile,
    ProfileEntry,
    ProfileError,
    close_scores,
    compare_with_decode,
    cumulate,
    expect_tokens,
    load_profile,
    plan_fixed_width,
    plan_nodes,
    plan_per_request,
    profile_target,
)
from bolegen_runtime.buffers import RoundBuffers
from bolegen_runtime.cache import (
    CacheEntry,
    CacheError,
    CacheWarning,
    KernelCache,
    clear_entries,
    list_entries,
)
from bolegen_runtime.graphs import GraphError, GraphPool, LayerWeights, VerifyGraph
from bolegen_runtime.loader import Request, load
from bolegen_runtime.record import LoadError
from bolegen_runtime.settings import Settings

__all__ = [
    "CacheEntry",
    "CacheError",
    "CacheWarning",
    "Clock",
    "Comparison",
    "CudaClock",
    "Environment",
    "GraphError",
    "GraphPool",
    "KernelCache",
    "LayerWeights",
    "LoadError",
    "Pass",
    "Profile",
    "ProfileEntry",
    "ProfileError",
    "Request",
    "RoundBuffers",
    "Settings",
    "VerifyGraph",
    "clear_entries",
    "close_scores",
    "compare_with_decode",
    "cumulate",
    "expect_tokens",
    "list_entries",
    "load",
    "load_profile",
    "plan_fixed_width",
    "plan_nodes",
    "plan_per_request",
    "profile_target",
]

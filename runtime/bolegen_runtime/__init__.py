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
from bolegen_runtime.checked import CheckedError, CheckedModule
from bolegen_runtime.dumps import RoundDump, capture_round, load_round, save_round
from bolegen_runtime.graphs import GraphError, GraphPool, VerifyGraph
from bolegen_runtime.lifetimes import (
    CanonicalState,
    LayerWeights,
    LifetimeError,
    RoundFactors,
    Scratch,
    SlotClaims,
    split_factors,
)
from bolegen_runtime.loader import Request, load
from bolegen_runtime.metrics import Metrics, expose_metrics
from bolegen_runtime.record import LoadError
from bolegen_runtime.rounds import Round
from bolegen_runtime.settings import Settings
from bolegen_runtime.topology import trace_links, trace_parents

__all__ = [
    "CacheEntry",
    "CacheError",
    "CacheWarning",
    "CanonicalState",
    "CheckedError",
    "CheckedModule",
    "Clock",
    "Comparison",
    "CudaClock",
    "Environment",
    "GraphError",
    "GraphPool",
    "KernelCache",
    "LayerWeights",
    "LifetimeError",
    "LoadError",
    "Metrics",
    "Pass",
    "Profile",
    "ProfileEntry",
    "ProfileError",
    "Request",
    "Round",
    "RoundBuffers",
    "RoundDump",
    "RoundFactors",
    "Scratch",
    "Settings",
    "SlotClaims",
    "VerifyGraph",
    "capture_round",
    "clear_entries",
    "close_scores",
    "compare_with_decode",
    "cumulate",
    "expect_tokens",
    "expose_metrics",
    "list_entries",
    "load",
    "load_profile",
    "load_round",
    "plan_fixed_width",
    "plan_nodes",
    "plan_per_request",
    "profile_target",
    "save_round",
    "split_factors",
    "trace_links",
    "trace_parents",
]

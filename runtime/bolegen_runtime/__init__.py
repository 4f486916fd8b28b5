"""What a server imports: generated modules by template and shapes, and CUDA graphs of them.

Needs torch and triton alone; the compiler is loaded only when a module must be compiled.
"""

from bolegen_runtime.buffers import RoundBuffers
from bolegen_runtime.cache import (
    CacheEntry,
    CacheError,
    CacheWarning,
    KernelCache,
    clear_entries,
    list_entries,
)
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
from bolegen_runtime.record import LoadError
from bolegen_runtime.rounds import Round
from bolegen_runtime.settings import Settings
from bolegen_runtime.topology import trace_links, trace_parents

__all__ = [
    "CacheEntry",
    "CacheError",
    "CacheWarning",
    "CanonicalState",
    "GraphError",
    "GraphPool",
    "KernelCache",
    "LayerWeights",
    "LifetimeError",
    "LoadError",
    "Request",
    "Round",
    "RoundBuffers",
    "RoundFactors",
    "Scratch",
    "Settings",
    "SlotClaims",
    "VerifyGraph",
    "clear_entries",
    "list_entries",
    "load",
    "split_factors",
    "trace_links",
    "trace_parents",
]

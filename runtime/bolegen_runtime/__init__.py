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
from bolegen_runtime.graphs import GraphError, GraphPool, LayerWeights, VerifyGraph
from bolegen_runtime.loader import Request, load
from bolegen_runtime.record import LoadError
from bolegen_runtime.settings import Settings

__all__ = [
    "CacheEntry",
    "CacheError",
    "CacheWarning",
    "GraphError",
    "GraphPool",
    "KernelCache",
    "LayerWeights",
    "LoadError",
    "Request",
    "RoundBuffers",
    "Settings",
    "VerifyGraph",
    "clear_entries",
    "list_entries",
    "load",
]

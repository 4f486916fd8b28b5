"""What a replay must not do: allocate, compile, or wait for the device."""
# mypy: disable-error-code="no-untyped-call"

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

__all__ = ["Noise", "listen"]


@dataclass
class Noise:
    """What happened while someone listened; waits raise at once, where PyTorch knows of them."""

    allocations: int = 0
    compilations: int = 0


@contextmanager
def listen(noise: Noise) -> Iterator[None]:
    """Add to ``noise`` what the body allocates on the GPU and has Triton compile."""
    runtime = triton.knobs.runtime
    earlier = runtime.jit_cache_hook

    def count(**_: Any) -> bool:
        noise.compilations += 1
        return False

    before = _allocations()
    runtime.jit_cache_hook = count
    with warnings.catch_warnings():
        # it says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runtime.jit_cache_hook = earlier
        noise.allocations += _allocations() - before


def _allocations() -> int:
    """Blocks handed out so far by PyTorch's allocator, counted on the host."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])

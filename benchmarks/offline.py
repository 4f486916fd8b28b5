# mypy: disable-error-code="no-untyped-def"
"""Compile for a GPU that is not there: a launch builds its kernel for sm_90 and runs nothing."""

import os
from contextlib import nullcontext
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["claim_cuda", "install"]

CAPABILITY = 90


class _Absent:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class _Claims(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for callers that insist."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def claim_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """The same CPU tensor, saying that it is on a GPU."""
    return tensor.as_subclass(_Claims)


def install() -> None:
    """From now on kernels are compiled and not launched; tensors may lie on the CPU."""
    os.environ["PEERS_SM"] = str(CAPABILITY)
    driver.set_active(_Absent())
    # peers make a tensor's device the current one
    torch.cpu.device = nullcontext  # type: ignore[attr-defined]
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only

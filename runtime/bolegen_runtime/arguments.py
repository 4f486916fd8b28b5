"""One shape of argument error: ValueError with the argument, what was expected and what came.

Raised before anything is done, so that a refused call has changed nothing.
"""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "INTEGERS",
    "expect_device",
    "expect_kind",
    "expect_module",
    "expect_number",
    "expect_path",
    "expect_tensor",
    "expect_whole",
]

INTEGERS = (torch.int32, torch.int64)


def expect_kind(name: str, value: object, kind: type, said: str = "") -> None:
    """An instance of a class; ``said``: what to call it."""
    if not isinstance(value, kind):
        said = said or f"a {kind.__name__}"
        raise ValueError(f"{name}: expected {said}, got {type(value).__name__}")


def expect_module(module: Any) -> None:
    """Something with the record of a generated module."""
    if not isinstance(module, ModuleType) or not hasattr(module, "MODULE"):
        raise ValueError(f"module: expected a generated module, got {type(module).__name__}")


def expect_whole(name: str, value: Any, least: int | None, most: int | None = None) -> int:
    """A whole number within bounds; True is none, and torch takes it for a mask."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or (least is not None and value < least) or (most is not None and value > most):
        bounds = "" if least is None else f" from {least}"
        bounds += "" if most is None else f" to {most}"
        raise ValueError(f"{name}: expected a whole number{bounds}, got {value!r:.40}")
    return int(value)


def expect_number(name: str, value: Any, least: float = 0.0) -> float:
    """A finite number; True is none."""
    try:
        fits = isinstance(value, Real) and not isinstance(value, bool)
        fits = fits and math.isfinite(value) and float(value) >= least
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: expected a number from {least:g}, got {value!r:.40}")
    return float(value)


def expect_device(device: Any, name: str = "device") -> torch.device:
    """A device that torch has here."""
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{name}: expected a device of this machine, got {device!r}: {said}"
        ) from (error)


def expect_path(path: Any, name: str = "path") -> Path:
    """A place in the file system."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{name}: expected a path, got {path!r:.40}")
    return Path(path)


def expect_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
    *,
    unit: bool = False,
) -> None:
    """A dense tensor; None = anything, ``unit`` = a last stride of 1."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        have = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected a tensor, got {have}")
    want = tuple("any" if size is None else size for size in shape)
    if len(shape) != tensor.dim() or any(
        size not in (None, have) for size, have in zip(shape, tensor.shape, strict=True)
    ):
        raise ValueError(f"{name}: expected shape {want}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        have = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: expected {have}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if unit and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a last stride of 1, got {tensor.stride(-1)}")

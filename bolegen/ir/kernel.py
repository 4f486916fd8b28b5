"""Level 2: the kernels of one module, as the templates and the ahead-of-time build see them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["Kernel", "KernelModule", "Param"]


@dataclass(frozen=True)
class Param:
    """One argument of a kernel: a pointer such as ``*bf16``, a scalar ``i32``, or a constant.

    ``value`` is what a constexpr (or an absent pointer, None) is compiled with; ``aligned``
    says that the ahead-of-time build may assume a multiple of 16.
    """

    name: str
    type: str
    value: object = None
    aligned: bool = True


@dataclass(frozen=True)
class Kernel:
    """One launch: its name in the emitted module, arguments in order, warps and stages.

    ``label``: what reports call it, where one kernel is launched in two ways.
    """

    name: str
    params: tuple[Param, ...]
    warps: int
    stages: int
    maxnreg: int | None = None  # cap of registers a thread, where the backend knows one
    label: str | None = None


@dataclass(frozen=True)
class KernelModule:
    """What is emitted: the kernels, and per template file the values that it spells."""

    name: str
    kernels: tuple[Kernel, ...]
    context: Mapping[str, object]

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", MappingProxyType(dict(self.context)))

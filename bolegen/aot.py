"""Ahead-of-time build for a GPU that need not be there: what each kernel will cost.

The only part of the compiler that imports torch and triton, and only when asked.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bolegen.codegen import EmittedModule
from bolegen.errors import EmitError, SpecError
from bolegen.ir import Kernel, Precision, Target

__all__ = ["KernelReport", "build_module", "expect_sound", "import_text", "triton_version"]


@dataclass(frozen=True)
class KernelReport:
    """One kernel on one target: registers a thread, bytes of spills and of shared memory."""

    kernel: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    dots: int  # tensor-core products in Triton's own IR
    fits: bool


def build_module(emitted: EmittedModule, target: Target) -> tuple[KernelReport, ...]:
    """Compile every kernel of ``emitted`` for ``target``; nothing is run.

    Needs torch and triton, and neither a GPU nor its driver. Raises SpecError under the
    interpreter, and EmitError where Triton cannot compile a kernel.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise SpecError(
            "the ahead-of-time build needs Triton's compiler; unset TRITON_INTERPRET and rerun"
        )
    module = import_text(emitted)
    precision = emitted.plan.precision
    return tuple(_build(module, precision, kernel, target) for kernel in emitted.module.kernels)


def import_text(emitted: EmittedModule) -> ModuleType:
    """Import emitted text from a temporary file: Triton reads the source of its kernels."""
    name = f"bolegen_aot_{emitted.digest}"
    if name in sys.modules:
        return sys.modules[name]
    folder = Path(tempfile.mkdtemp(prefix="bolegen-aot-"))
    path = folder / f"{emitted.name}.py"
    path.write_text(emitted.text, "utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EmitError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def triton_version() -> str:
    """The installed Triton, major.minor."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def _build(
    module: ModuleType, precision: Precision, kernel: Kernel, target: Target
) -> KernelReport:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {param.name: param.type for param in kernel.params}
    constants: dict[Any, Any] = {
        (i,): param.value for i, param in enumerate(kernel.params) if param.type == "constexpr"
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, param in enumerate(kernel.params)
        if param.type != "constexpr" and param.aligned
    }
    # what the module decides at launch by the device is decided here by the target
    for i, param in enumerate(kernel.params):
        if param.value == precision.dot and target.backend == "hip":
            constants[(i,)] = precision.hip_dot
        if param.name == "OVERLAP":
            constants[(i,)] = target.overlaps and kernel.label != "merged"
    source = ASTSource(getattr(module, kernel.name), signature, constants, aligned)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    if kernel.maxnreg is not None and target.backend == "cuda":
        options["maxnreg"] = kernel.maxnreg
    try:
        built = compile(
            source, target=GPUTarget(target.backend, target.arch, target.warp), options=options
        )
    except Exception as error:
        raise EmitError(f"{kernel.name} does not compile for {target.name}: {error}") from error
    return _report(built, kernel, target)


def _report(built: Any, kernel: Kernel, target: Target) -> KernelReport:
    if target.backend == "hip":
        registers, spill = _read_amd(built.asm["amdgcn"])
    else:
        registers, spill = _read_cubin(built.asm["cubin"])
        expect_sound(kernel, target, built.asm["llir"])
    smem = int(built.metadata.shared)
    return KernelReport(
        kernel=kernel.label or kernel.name.partition("_")[0],
        registers=registers,
        spill_bytes=spill,
        smem_bytes=smem,
        dots=built.asm["ttir"].count("tt.dot "),
        fits=smem <= target.smem_bytes,
    )


def expect_sound(kernel: Kernel, target: Target, llvm: str) -> None:
    """EmitError where LLVM paired a shift that cannot overflow with one that can.

    Its NVPTX backend then lets what the second shifts out run into the first: indices of nodes
    come out wrong, and nothing else fails (seen under Triton 3.6 in a factor kernel).
    """
    for one, other in re.findall(
        r"= shl (?:nuw |nsw )+<2 x i32> [^,]+, <i32 (\w+), i32 (\w+)>", llvm
    ):
        if one != other:
            raise EmitError(
                f"{kernel.name} for {target.name}: this Triton's LLVM vectorises shifts by {one} "
                f"and {other} as one, which its backend gets wrong; use another tree or Triton"
            )


def _read_amd(assembly: str) -> tuple[int, int]:
    """Vector registers and spilled bytes a thread, from the assembly's metadata."""

    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    return value("vgpr_count"), 4 * value("vgpr_spill_count")


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, as cuobjdump (in Triton's package) reads them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", output)
    if found is None:
        raise EmitError(f"cuobjdump printed no registers: {output[:200]!r}")
    return int(found.group(1)), int(found.group(2))

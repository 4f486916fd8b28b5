# mypy: allow-untyped-calls, disable-error-code="import-not-found,import-untyped"
"""Build FlashInfer's verify of chains for sm_90a, without a GPU: -> ``.peers/flashinfer/``.

``python benchmarks/peers/build_flashinfer.py`` downloads the wheels (300 MB), compiles the kernels
that FlashInfer itself would choose for each case of 8 nodes, and links them into one library; a
JSON file beside it names the function of each ``"value heads,batch"``. What loads the library,
tvm-ffi for the Python of the GPU machine (``--python``), is unpacked there too: 6 MiB in all.
Needs gcc. No peer's code is kept here.
"""

import argparse
import ctypes
import importlib
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.cases import MODELS, Shape, list_cases  # noqa: E402

__all__ = ["FOLDER", "main"]

FOLDER = ROOT / ".peers/flashinfer"
FLASHINFER = "flashinfer-python==0.7.4"
LOADER = "apache-tvm-ffi==0.1.15.post2"
_DSL = ("", "-libs-base", "-libs-core", "-libs-cu13")
COMPILER = (
    *(f"nvidia-cutlass-dsl{part}==4.8.1" for part in _DSL),
    LOADER, "cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1", "nvidia-cuda-runtime==13.5.37",
    "protobuf==7.36.2",
)  # fmt: skip
NODES = 8
_PLATFORMS = ("manylinux_2_24_x86_64", "manylinux_2_28_x86_64")
# of the loader's wheel: sources and headers, which loading needs not
_LEFT_OUT = ("tvm_ffi/3rdparty/", "tvm_ffi/include/", "tvm_ffi/src/", "tvm_ffi/share/")
# the one symbol of the DSL's runtime that its static library lacks: how an error is raised
_RAISE = """#include <stdint.h>
void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*raise)(const char *, const char **, int32_t), int32_t code) {
  const char *said[1] = {"CUDA error at a launch of FlashInfer's"};
  (void)code;
  raise("RuntimeError", said, 1);
}
"""


def main() -> int:
    """Download, compile, link, lay out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--python", default="3.12", help="of the machine that will load it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        _fetch(work)
        table = _build_all(work)
        _link(work, options.out / "libflashinfer.so")
        (options.out / "libflashinfer.json").write_text(json.dumps(table) + "\n", "utf-8")
        _add_loader(work, options.out, options.python)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {len(set(table.values()))} functions, {size / 2**20:.1f} MiB")
    return 0


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    subprocess.run([*command[:4], "--quiet", "--no-deps", *command[4:]], check=True)


def _fetch(work: Path) -> None:
    """FlashInfer's Python files in ``work/peer``, the compiler importable from ``work/site``."""
    _pip("download", "-d", work / "wheels", FLASHINFER)
    (wheel,) = (work / "wheels").glob("flashinfer_python-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = ("flashinfer/gdn_kernels/", "flashinfer/jit/")
        archive.extractall(
            work / "peer", [each for each in archive.namelist() if each.startswith(wanted)]
        )
    _pip("install", "--target", work / "site", *COMPILER)
    site.addsitedir(str(work / "site"))


def _package(name: str, folder: Path) -> None:
    """A package whose own __init__, which imports all of FlashInfer, does not run."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def _build_all(work: Path) -> dict[str, str]:
    """An object file in ``work`` for every function; the function of each heads and batch."""
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    for name in ("flashinfer", "flashinfer.gdn_kernels", "flashinfer.jit"):
        _package(name, work / "peer" / name.replace(".", "/"))
    unused: Any = types.ModuleType("flashinfer.jit.cute_dsl_core")
    unused.build_and_load_cute_dsl_kernel = None
    sys.modules[unused.__name__] = unused
    kernels = importlib.import_module("flashinfer.gdn_kernels.gdn_decode_mtp")
    table: dict[str, str] = {}
    for model, batch in sorted({(c.model, c.batch) for c in list_cases() if c.chain}):
        shape = MODELS[model]
        heads = shape.value_heads
        tile_v, _, rows, shared = kernels.get_mtp_config(batch, NODES, heads, shape.d_v, True)
        # few programs compute their gates themselves
        inline = batch * heads <= 128
        name = f"verify_h{heads}_v{tile_v}_r{rows}_s{int(shared)}_i{int(inline)}"
        if name not in table.values():
            how = {"tile_v": tile_v, "ilp_rows": rows, "use_smem_v": shared}
            kernel = f"run_gdn_verify_kernel_mtp{'_inline' if inline else ''}"
            _build(getattr(kernels, kernel), shape, how, work / f"{name}.o")
            print(name, flush=True)
        table[f"{heads},{batch}"] = name
    return table


class _Claimed:
    """A CPU tensor that says that it is on CUDA: dtype, shape and strides are all that is used."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor: a pointer, then the kind of the device
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = 2
        return capsule


def _build(kernel: Any, shape: Shape, how: dict[str, Any], path: Path) -> None:
    """Compile one function for chains of any batch, with or without snapshots, and export it."""
    cutlass, cute = importlib.import_module("cutlass"), importlib.import_module("cutlass.cute")
    from_dlpack = importlib.import_module("cutlass.cute.runtime").from_dlpack
    stream = importlib.import_module("cuda.bindings.driver").CUstream(0)
    batch, hk, hv, d = 2, shape.key_heads, shape.value_heads, shape.d_k

    def fixed(tensor: torch.Tensor, **options: Any) -> Any:
        return from_dlpack(_Claimed(tensor), enable_tvm_ffi=True, **options)

    def strided(tensor: torch.Tensor) -> Any:
        return fixed(tensor, assumed_align=16).mark_layout_dynamic()

    def states(count: int) -> Any:
        pool = fixed(torch.zeros(count, d, d), assumed_align=16)
        return pool.mark_compact_shape_dynamic(mode=0, stride_order=(0, 1, 2), divisibility=1)

    def index(*size: int) -> Any:
        return strided(torch.zeros(*size, dtype=torch.int32))

    rows = torch.zeros(batch, NODES, (2 * hk + hv) * d, dtype=torch.bfloat16)
    parts = rows.split([hk * d, hk * d, hv * d], -1)
    q, k, v = (strided(part.unflatten(-1, (-1, d))) for part in parts)
    gates = torch.zeros(batch, NODES, hv, dtype=torch.bfloat16)
    a, b = (fixed(gates).mark_layout_dynamic() for _ in range(2))
    rate, bias = fixed(torch.zeros(hv)), fixed(torch.zeros(hv))
    out = strided(torch.zeros(batch, NODES, hv, d, dtype=torch.bfloat16))
    options = cute.GPUArch("sm_90a"), cute.EnableTVMFFI(True)
    compiled = cute.compile[options](
        kernel, states(3 * hv), states(batch * NODES * hv), rate, a, bias, q, k, v, b, out,
        index(batch), index(batch), index(batch + 1), index(batch, NODES), v, k, rate, rate,
        softplus_beta=1.0, softplus_threshold=20.0, scale=d**-0.5, HV=hv, T=NODES,
        cache_steps=NODES, H=hk, K=d, V=shape.d_v, vec_size=4, use_initial_state=True,
        use_qk_l2norm=True, is_varlen=False, disable_state_update=True,
        cache_intermediate_states=cutlass.Boolean(True), use_pool_indexing=False,
        use_packed_fma=False, per_token_pool_scatter=False, cache_replayssm=False,
        stream=stream, **how,
    )  # fmt: skip
    compiled.export_to_c(str(path), function_name=path.stem)


def _link(work: Path, library: Path) -> None:
    """All object files, and the DSL's runtime, in one shared library."""
    stub, installed = work / "raise.c", work / "site"
    stub.write_text(_RAISE, "utf-8")
    runtime = installed / "nvidia_cutlass_dsl/cu13/lib/libcuda_dialect_runtime_static.a"
    command: list[Any] = ["gcc", "-shared", "-fPIC", "-o", library, stub, *work.glob("*.o")]
    command += ["-Wl,--whole-archive", runtime, "-Wl,--no-whole-archive"]
    command += [f"-L{installed / 'tvm_ffi/lib'}", "-ltvm_ffi"]
    command += [f"-L{installed / 'nvidia/cu13/lib'}", "-l:libcudart.so.13"]
    subprocess.run([str(each) for each in command], check=True)


def _add_loader(work: Path, out: Path, python: str) -> None:
    """tvm-ffi for another Python, without its sources."""
    platforms = [f"--platform={name}" for name in _PLATFORMS]
    only = ["--only-binary=:all:", f"--python-version={python}", *platforms]
    _pip("download", "-d", work / "loader", *only, LOADER)
    (wheel,) = (work / "loader").glob("*.whl")
    shutil.rmtree(out / "tvm_ffi", ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        kept = [name for name in archive.namelist() if name.startswith("tvm_ffi/")]
        archive.extractall(out, [n for n in kept if not n.startswith(_LEFT_OUT)])


if __name__ == "__main__":
    sys.exit(main())

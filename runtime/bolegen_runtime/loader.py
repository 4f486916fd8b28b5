"""From a request to an imported module: in memory, in generated/, in the cache, or compiled.

A server needs torch and triton alone as long as one of the first three has the module.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import triton

from bolegen_runtime.arguments import expect_kind, expect_whole
from bolegen_runtime.cache import KernelCache
from bolegen_runtime.checked import CheckedModule
from bolegen_runtime.record import LoadError, digest_of, import_text, read_record
from bolegen_runtime.settings import Settings

__all__ = ["DTYPES", "Request", "chosen_solver", "compiler_digest", "digest_folder", "load"]

# how users spell a storage type -> torch's name of it
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SOLVERS = ("horner", "levels", "substitution")
# what a module's name says beyond its record: a solver that was chosen, a target
_CHOSEN = re.compile(rf"_({'|'.join(SOLVERS)}|sm_[0-9]+|gfx[0-9a-f]+)(?=_|$)")
_AROUND_SIGNS = re.compile(r"\s*([(),:\[\]])\s*")
_loaded: dict[tuple[Request, Settings], ModuleType] = {}
_loading = threading.RLock()


@dataclass(frozen=True)
class Request:
    """Everything that decides a module's text; equal requests give the same module.

    Fields as in `bolegen compile`: heads (Hk, Hv), dims (d_k, d_v), depth in edges or None for
    the template's own, solver None for the compiler's choice. Raises ValueError.
    """

    template: str
    depth: int | None = None
    heads: tuple[int, int] = (16, 32)
    dims: tuple[int, int] = (128, 128)
    conv: int = 4
    dtype: str = "bf16"
    state_dtype: str = "fp32"
    factors: str = "replay"
    contract: str = "fp32"
    readout: str = "split"
    solver: str | None = None
    mixer: str = "gdn"

    def __post_init__(self) -> None:
        for name, value, have in (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("state_dtype", self.state_dtype, tuple(DTYPES)),
            ("solver", self.solver, (None, *SOLVERS)),
        ):
            if value not in have:
                raise ValueError(f"{name}: expected one of {have}, got {value!r}")
        for name in ("factors", "contract", "readout", "mixer"):
            expect_kind(name, getattr(self, name), str, "a name")
        for name, pair in (("heads", self.heads), ("dims", self.dims)):
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"{name}: expected two numbers, got {pair!r:.40}")
            numbers = tuple(expect_whole(name, each, 1) for each in pair)
            object.__setattr__(self, name, numbers)
        if self.depth is not None:
            object.__setattr__(self, "depth", expect_whole("depth", self.depth, 0))
        object.__setattr__(self, "conv", expect_whole("conv", self.conv, 1))
        expect_kind("template", self.template, str, "a template in words")
        object.__setattr__(self, "template", _spell(self.template))

    @property
    def key(self) -> str:
        """SHA-256 of all fields, hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def is_answered_by(self, record: dict[str, object]) -> bool:
        """Whether a module with this MODULE record is what is asked for."""
        want = asdict(self)
        for name in ("dtype", "state_dtype"):
            want[name] = DTYPES[want[name]]
        want["depth"] = _depth(self.depth, record)
        chosen = {want.pop("solver")} - {None}
        return (
            _is_same_tree(want.pop("template"), record)
            and chosen == set(_CHOSEN.findall(str(record["name"])))
            and all(record.get(name) == value for name, value in want.items())
        )


def load(
    template: str,
    *,
    depth: int | None = None,
    heads: tuple[int, int] = (16, 32),
    dims: tuple[int, int] = (128, 128),
    conv: int = 4,
    dtype: str = "bf16",
    state_dtype: str = "fp32",
    factors: str = "replay",
    contract: str = "fp32",
    readout: str = "split",
    solver: str | None = None,
    mixer: str = "gdn",
    settings: Settings | None = None,
) -> ModuleType:
    """The generated module for this template and these shapes, imported.

    From memory, then ``settings.generated_dir``, then the cache, and compiled as the last
    resort. Defaults are those of `bolegen compile`; ``settings`` default to the environment's.
    A CheckedModule where ``settings.checked``. Under Triton's interpreter, that is mended as
    well. Raises ValueError for an argument, LoadError, CacheError, and what the compiler raises
    (TreeError, SpecError).
    """
    request = Request(
        template, depth, heads, dims, conv, dtype, state_dtype, factors, contract, readout,
        solver, mixer,
    )  # fmt: skip
    if settings is None:
        settings = Settings.from_env()
    expect_kind("settings", settings, Settings)
    with _loading:
        if (request, settings) not in _loaded:
            _mend_interpreter()
            text, path = _find_generated(request, settings) or _find_compiled(request, settings)
            module = import_text(text, path)
            _loaded[request, settings] = CheckedModule(module) if settings.checked else module
        return _loaded[request, settings]


def chosen_solver(name: str) -> str | None:
    """The solver that a module's name says was asked for."""
    return next((part for part in _CHOSEN.findall(name) if part in SOLVERS), None)


def _spell(template: str) -> str:
    """The template without white space around its signs; a file's parents instead of its name."""
    kind, _, rest = template.strip().partition(":")
    if kind != "file":
        return _AROUND_SIGNS.sub(r"\1", template.strip())
    try:
        value = json.loads(Path(rest).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"template: cannot read {template}: {error}") from error
    if isinstance(value, dict):
        value = value.get("parents")
    return f"parents:{json.dumps(value, separators=(',', ':'))}"


def _is_same_tree(template: str, record: dict[str, object]) -> bool:
    """The compiler names a tree in its shortest way; engines have its parents at hand."""
    return template == record.get("template") or (
        record["parents"] is not None
        and template
        == f"parents:[{','.join(map(str, cast('tuple[int, ...]', record['parents'])))}]"
    )


def _depth(depth: int | None, record: dict[str, object]) -> int:
    """The depth that a module for this tree has when ``depth`` is asked for."""
    parents = cast("tuple[int, ...] | None", record["parents"])
    if parents is None:
        deepest = cast(int, record["nodes"]) - 1
        return deepest if depth is None else min(depth, deepest)
    if depth is not None:
        return depth
    levels: list[int] = []
    for parent in parents:
        levels.append(0 if parent < 0 else levels[parent] + 1)
    return max(levels)


def _find_generated(request: Request, settings: Settings) -> tuple[str, Path] | None:
    """The module of generated_dir that answers the request; no module is run to find out."""
    folder = settings.generated_dir
    if folder is None:
        return None
    if not folder.is_dir():
        raise LoadError(
            f"Settings.generated_dir (BOLEGEN_GENERATED_DIR) is {folder}, which is no folder"
        )
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.py")):
        try:
            text = path.read_bytes().decode()
            record = read_record(text)
        except (LoadError, UnicodeDecodeError) as error:
            raise LoadError(f"{path} is not what the compiler wrote: {error}") from error
        if record is None or not request.is_answered_by(record):
            continue
        digest = digest_of(text)
        if digest != record["digest"]:
            raise LoadError(
                f"{path} is not what the compiler wrote: its digest is {digest}, its record says "
                f"{record['digest']}. Write it again with bolegen compile, or remove it"
            )
        found.setdefault(str(record["digest"]), (text, path))
    if len(found) > 1:
        names = ", ".join(str(path) for _, path in found.values())
        raise LoadError(f"{names} all answer {request.template}; keep one of them")
    return next(iter(found.values()), None)


def _find_compiled(request: Request, settings: Settings) -> tuple[str, Path | None]:
    """From the disk cache, or from the compiler."""
    build = functools.partial(_compile, request)
    if settings.cache_dir is None:
        return build()[1], None
    cache = KernelCache(settings.cache_dir, compiler_digest())
    return cache.get(request.key, build, request=asdict(request))


def _compile(request: Request) -> tuple[str, str]:
    """Name and text of the module. The compiler loads jinja2, so it is imported this late."""
    from bolegen.codegen import compile_template
    from bolegen.ir import DType, LayerSpec, Solver, find_mixer

    spec = LayerSpec(
        find_mixer(request.mixer),
        *request.heads,
        *request.dims,
        conv=request.conv,
        dtype=DType(request.dtype),
        state_dtype=DType(request.state_dtype),
        factors=request.factors,
        contract=request.contract,
        readout=request.readout,
    )
    solver = Solver(request.solver) if request.solver else None
    emitted = compile_template(request.template, spec, depth=request.depth, solver=solver)
    return emitted.name, emitted.text


@functools.cache
def compiler_digest() -> str:
    """Sixteen hexadecimal digits over the compiler's own files, found without importing it.

    A version number would serve stale modules while the compiler is being worked on.
    """
    spec = importlib.util.find_spec("bolegen")
    if spec is None or spec.origin is None:
        raise LoadError(
            "the module is not in Settings.generated_dir (BOLEGEN_GENERATED_DIR) and bolegen is "
            "not installed to compile it; write it with bolegen compile, or install bolegen"
        )
    return digest_folder(Path(spec.origin).parent)


def digest_folder(root: Path) -> str:
    """Sixteen hexadecimal digits over names and contents of all sources and templates below."""
    total = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".py", ".jinja"}):
        data = path.read_bytes()
        total.update(f"{path.relative_to(root)} {len(data)}\n".encode() + data)
    return total.hexdigest()[:16]


def _mend_interpreter() -> None:
    """Without this a bf16 module computes nonsense under TRITON_INTERPRET=1."""
    if not triton.knobs.runtime.interpret:
        return
    from bolegen_runtime import interpreter

    if interpreter.is_interpreting():
        interpreter.install()

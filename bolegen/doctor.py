"""What is installed here, what works, and how to mend what does not."""

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from bolegen.codegen import compile_template
from bolegen.ir import TARGETS
from bolegen.version import __version__

__all__ = ["examine"]

_PACKAGES = ("torch", "triton", "numpy", "networkx", "jinja2", "sympy")


def examine() -> list[tuple[str, str]]:
    """Rows of (what, finding): versions, device, cache folder, and what works here."""
    rows = [("bolegen", __version__), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in _PACKAGES]
    device, running = _device()
    compiled = compile_template("(3,3,3)")
    return [
        *rows,
        ("device", device),
        ("cache", _cache()),
        ("compile", f"works: {compiled.name}, {len(compiled.text.splitlines())} lines"),
        ("prove", "works" if _has("sympy") else "no: install sympy"),
        ("run", running),
        ("targets", ", ".join(TARGETS)),
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _device() -> tuple[str, str]:
    """The GPU, and how generated modules run here."""
    if not (_has("torch") and _has("triton")):
        return "unknown without torch", "no: install torch and triton"
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()}, sm_{major}{minor}", "works on the GPU"
    how = "works on CPU tensors in Triton's interpreter, with TRITON_INTERPRET=1 set at start"
    return "no GPU", how


def _cache() -> str:
    """Where the runtime keeps compiled modules, and whether it can."""
    if not _has("bolegen_runtime"):
        return "no runtime installed"
    from bolegen_runtime import Settings

    try:
        folder = Settings.from_env().cache_dir
    except ValueError as error:
        return str(error)
    if folder is None:
        return "off"
    probe = folder
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    usable = os.access(probe, os.W_OK)
    return f"{folder}, {'writable' if usable else 'not writable: set BOLEGEN_CACHE_DIR'}"

"""Who loads whom: in a fresh process, and in the text of the modules."""

import ast
import sys
from pathlib import Path

import pytest

from repo.sources import ROOT, imported_names, module_files, parsed, run_python

HEAVY = {"torch", "triton", "sympy", "sglang", "transformers", "matplotlib"}
COMPILER_ONLY = {"bolegen", "jinja2", "sympy", "networkx"}
OUTPUT_NEEDS = {"torch", "triton"} | set(sys.stdlib_module_names)


def loaded_by(statement: str) -> set[str]:
    """Top-level names of all modules in a fresh interpreter after one statement."""
    printed = run_python("-c", f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')")
    return {name.partition(".")[0] for name in printed.splitlines()}


def loaded_on_import(node: ast.AST) -> set[str]:
    """Modules that a file imports outside of functions and of ``if TYPE_CHECKING``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return set()
    if isinstance(node, ast.Import | ast.ImportFrom):
        return imported_names(node)
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        inner = list(node.orelse)
    return set().union(*map(loaded_on_import, inner))


@pytest.mark.parametrize("module", ["bolegen", "bolegen.cli"])
def test_the_compiler_loads_nothing_heavy(module: str) -> None:
    assert not loaded_by(f"import {module}") & HEAVY


def test_the_runtime_loads_nothing_of_the_compiler() -> None:
    # torch itself may load some of these: only what the runtime adds counts
    with_torch = loaded_by("import torch, triton")
    assert not (loaded_by("import bolegen_runtime") - with_torch) & COMPILER_ONLY


@pytest.mark.parametrize(
    "path", module_files("runtime/bolegen_runtime"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_runtime_module_names_the_compiler_at_import(path: Path) -> None:
    tops = {name.partition(".")[0] for name in loaded_on_import(parsed(path))}
    assert not tops & COMPILER_ONLY


@pytest.mark.parametrize("path", module_files("generated"), ids=lambda p: p.stem)
def test_a_generated_module_needs_torch_and_triton_alone(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported_names(parsed(path))}
    assert tops <= OUTPUT_NEEDS
    assert {"torch", "triton"} <= tops


def test_there_is_a_runtime_and_a_generated_module_to_look_at() -> None:
    assert len(module_files("runtime/bolegen_runtime")) > 1
    assert len(module_files("generated")) > 1

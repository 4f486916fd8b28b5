"""Every module says what is public, and everything public says what it is."""

import ast
import importlib
from pathlib import Path

import pytest

from repo.sources import PACKAGES, ROOT, module_files, module_name, parsed

MODULES = [path for package in PACKAGES for path in module_files(package)]
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))


def public_names(tree: ast.Module) -> list[str] | None:
    """The literal value of ``__all__``, None where there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            value = getattr(node, "value", None)
            assert value is not None
            names: list[str] = list(ast.literal_eval(value))
            return names
    return None


def undocumented(path: Path) -> list[str]:
    """Public functions, classes and methods that the file defines without a docstring."""
    tree = parsed(path)
    public = set(public_names(tree) or ())
    missing: list[str] = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in public:
            continue
        if not ast.get_docstring(node):
            missing.append(node.name)
        methods = [m for m in getattr(node, "body", []) if isinstance(m, ast.FunctionDef)]
        if isinstance(node, ast.ClassDef):
            missing += [
                f"{node.name}.{m.name}"
                for m in methods
                if not m.name.startswith("_") and not ast.get_docstring(m)
            ]
    return missing


@every_module
def test_a_module_says_what_it_is_and_what_is_public(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), "no module docstring"
    assert public_names(parsed(path)) is not None, "no __all__"


@every_module
def test_everything_public_has_a_docstring(path: Path) -> None:
    assert not undocumented(path)


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path.name != "__main__.py"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_every_public_name_exists(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    missing = [name for name in public_names(parsed(path)) or () if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize(("package", "at_least"), list(zip(PACKAGES, (20, 4, 2), strict=True)))
def test_there_are_modules_to_look_at(package: str, at_least: int) -> None:
    assert len(module_files(package)) >= at_least

"""The repository's own files and modules, found once for all tests of this folder."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = [
    "PACKAGES",
    "ROOT",
    "imported_names",
    "module_files",
    "module_name",
    "parsed",
    "run_python",
    "tracked_files",
]

ROOT = Path(__file__).resolve().parents[2]

# where importable modules lie: folder -> what precedes their dotted name in the path
PACKAGES = {"bolegen": ROOT, "runtime/bolegen_runtime": ROOT / "runtime", "generated": ROOT}
SKIPPED = {"build", "dist", "__pycache__"}


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that git has or would take; without git, all but hidden and built ones."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        return tuple(sorted(ROOT / name for name in listed if name and (ROOT / name).is_file()))
    return tuple(sorted(_walk(ROOT)))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        hidden = entry.name.startswith(".") and entry.name not in {".ci", ".gitignore"}
        if hidden or entry.name in SKIPPED:
            continue
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry


@cache
def module_files(package: str) -> tuple[Path, ...]:
    """The Python files below one key of PACKAGES, sorted."""
    return tuple(sorted((ROOT / package).rglob("*.py")))


def module_name(path: Path) -> str:
    """The dotted name under which a file of PACKAGES is imported."""
    base = next(b for package, b in PACKAGES.items() if path.is_relative_to(ROOT / package))
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(tree: ast.AST) -> set[str]:
    """Dotted names of the modules that a tree imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def run_python(*arguments: str, path: tuple[Path, ...] = (ROOT, ROOT / "runtime")) -> str:
    """What a fresh interpreter prints, with ``path`` before everything else it can import from."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT / "tests",  # never the root: an import must come from ``path``
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{arguments} exited {done.returncode}:\n{done.stderr}"
    return done.stdout

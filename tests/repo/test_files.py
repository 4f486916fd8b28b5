"""Rules about the repository's text: sizes, words, and where the environment is read."""

import ast
import re
from pathlib import Path

import pytest

from repo.sources import ROOT, module_files, parsed, tracked_files

MAX_LINES = 300
UNMEASURED = ("generated", "tests", "benchmarks")

# written so that no pattern matches itself
FORBIDDEN = {
    "a path of one machine": r"/wor[k]/|/roo[t]/|/hom[e]/\w",
    "a package registry": r"pyp[i]\.org|pythonhoste[d]|download\.pytorc[h]|pyp[i]-",
    "a word about how the text came to be": (
        r"(?<!scope=\")\bsessio[n]s?\b|\bhelpe[r]s?\b|devic[e] tool|befor[e]-stop"
    ),
    "a document that is not here": r"\bBRIE[F]\b|styl[e]-anchors|fiel[d]-reports|peer[s]-h200",
}
BINARIES = {".so", ".cubin", ".whl", ".gz", ".xz", ".tar", ".zip", ".pyc"}


def text_of(path: Path) -> str | None:
    """A tracked file's text, None for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_a_file_fits_on_a_few_screens() -> None:
    measured = [
        path
        for path in tracked_files()
        if path.suffix in {".py", ".jinja"} and path.relative_to(ROOT).parts[0] not in UNMEASURED
    ]
    lines = {
        str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in measured
    }
    assert len(lines) > 20
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.IGNORECASE if what.startswith("a word") else 0)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        for number, line in enumerate((text_of(path) or "").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_nothing_built_is_tracked() -> None:
    assert not [path for path in tracked_files() if path.suffix in BINARIES]


def test_only_settings_read_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for package in ("bolegen", "runtime/bolegen_runtime")
        for path in module_files(package)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    assert readers <= {"runtime/bolegen_runtime/settings.py"}


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (path.relative_to(ROOT).as_posix(), target)
        for path in tracked_files()
        if path.suffix == ".md" or path == ROOT / ".ci" / "run"
        for target in re.findall(r"(?:`|^ *)make ([a-z0-9]+)", text_of(path) or "", re.MULTILINE)
    }
    assert {"demo", "test"} <= {target for _, target in named}
    assert not {(where, target) for where, target in named if target not in targets}

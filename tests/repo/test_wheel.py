"""What a user installs: the built wheel, unpacked into an empty folder."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from repo.sources import ROOT, run_python


def run_module(*arguments: str) -> None:
    """``python -m ...`` in the repository's root; what it prints is shown only if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with what the environment has: nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    run_module("build", "--wheel", "--no-isolation", "--outdir", str(folder))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    run_module("pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def test_the_wheel_holds_every_source_template_and_type_marker(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(base).as_posix()
        for base, package in ((ROOT, "bolegen"), (ROOT / "runtime", "bolegen_runtime"))
        for pattern in ("*.py", "*.jinja", "py.typed")
        for path in (base / package).rglob(pattern)
    }
    assert wanted <= held
    assert {"bolegen/py.typed", "bolegen_runtime/py.typed"} <= held
    assert len([name for name in held if name.endswith(".jinja")]) > 1


def test_the_wheel_puts_two_packages_into_site_packages_and_no_more(wheel: Path) -> None:
    run_module("check_wheel_contents", str(wheel))


def test_the_wheel_says_the_version_that_the_package_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        (metadata,) = (name for name in held.namelist() if name.endswith("/METADATA"))
        lines = held.read(metadata).decode().splitlines()
    said = run_python("-c", "import bolegen; print(bolegen.__version__)").strip()
    assert f"Version: {said}" in lines
    assert "License-Expression: Apache-2.0" in lines


def test_the_installed_wheel_compiles_a_template(installed: Path, tmp_path: Path) -> None:
    where = run_python("-c", "import bolegen; print(bolegen.__file__)", path=(installed,))
    assert Path(where.strip()).is_relative_to(installed)

    arguments = ("compile", "--template", "(2,2)", "--out", str(tmp_path / "new"))
    run_python("-m", "bolegen", *arguments, path=(installed,))
    (module,) = (tmp_path / "new").iterdir()
    assert "import triton" in module.read_text(encoding="utf-8")

"""Settings say where modules come from, and alone read the environment."""

import os
from pathlib import Path

import pytest

from bolegen_runtime import Settings

HOME = {"HOME": "/nowhere/me"}


@pytest.mark.parametrize(
    ("environ", "cache_dir"),
    [
        ({"BOLEGEN_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"} | HOME, "/a/b"),
        ({"BOLEGEN_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"} | HOME, "/x/bolegen"),
        ({"XDG_CACHE_HOME": "relative"} | HOME, "/nowhere/me/.cache/bolegen"),
        (HOME, "/nowhere/me/.cache/bolegen"),
        ({"BOLEGEN_CACHE_DIR": "off"} | HOME, None),
    ],
)
def test_the_cache_folder_follows_the_environment(
    environ: dict[str, str], cache_dir: str | None
) -> None:
    assert Settings.from_env(environ).cache_dir == (Path(cache_dir) if cache_dir else None)


def test_there_are_no_generated_modules_unless_a_folder_is_named() -> None:
    assert Settings.from_env(HOME).generated_dir is None
    given = Settings.from_env({"BOLEGEN_GENERATED_DIR": "/a/generated"} | HOME)
    assert given.generated_dir == Path("/a/generated")


@pytest.mark.parametrize(("said", "checked"), [("1", True), ("0", False), ("", False)])
def test_checked_mode_is_asked_for(said: str, checked: bool) -> None:
    assert Settings.from_env({"BOLEGEN_CHECKED": said} | HOME).checked is checked
    assert not Settings.from_env(HOME).checked


def test_checked_mode_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="BOLEGEN_CHECKED: expected 1 or 0, got 'yes'"):
        Settings.from_env({"BOLEGEN_CHECKED": "yes"} | HOME)


def test_a_relative_folder_means_the_one_that_it_names_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Settings.from_env({"BOLEGEN_CACHE_DIR": "c", "BOLEGEN_GENERATED_DIR": "./g/../g"})
    assert found == Settings(cache_dir=tmp_path / "c", generated_dir=tmp_path / "g")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", "/from/here")
    assert Settings.from_env().cache_dir == Path("/from/here")


def test_without_a_home_the_cache_is_in_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.warns(RuntimeWarning, match="BOLEGEN_CACHE_DIR"):
        assert Settings.from_env({}).cache_dir is None

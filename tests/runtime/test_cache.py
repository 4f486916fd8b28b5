"""The disk cache returns what was put in, or builds it again; what others can write is refused."""

import fcntl
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from bolegen_runtime import (
    CacheError,
    CacheWarning,
    KernelCache,
    cache,
    clear_entries,
    list_entries,
)

KEY, OTHER = "ab" * 32, "cd" * 32
COMPILER = "0123456789abcdef"
REQUEST = {"template": "(2,1)", "heads": [1, 2]}
TEXT = "# σ(x)\nANSWER = 42\n"


class Builder:
    """A compiler that counts."""

    def __init__(self, text: str = TEXT) -> None:
        self.text, self.runs = text, 0

    def __call__(self) -> tuple[str, str]:
        self.runs += 1
        return "gdn_2x1_d2", self.text


def get(store: KernelCache, build: Builder, key: str = KEY) -> tuple[str, Path | None]:
    return store.get(key, build, request=REQUEST)


def record_of(store: KernelCache) -> Path:
    return store.folder / f"{KEY}.json"


def source_of(store: KernelCache) -> Path:
    (path,) = store.folder.glob("*.py")
    return path


@pytest.fixture
def store(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache", COMPILER)


def test_an_entry_is_built_once_and_is_private(store: KernelCache) -> None:
    build = Builder()
    text, path = get(store, build)
    assert get(store, build) == (text, path) == (TEXT, source_of(store))
    assert build.runs == 1
    assert source_of(store).read_bytes() == TEXT.encode()
    modes = {p.name: p.stat().st_mode & 0o777 for p in [store.root, store.folder]}
    assert set(modes.values()) == {0o700}
    assert {p.stat().st_mode & 0o777 for p in store.folder.iterdir()} == {0o600}


def test_the_file_is_named_by_its_contents(store: KernelCache) -> None:
    first = get(store, Builder())
    assert get(store, Builder(), OTHER) == first
    changed = get(store, Builder("ANSWER = 43\n"), "ef" * 32)
    assert changed[1] != first[1]


def test_a_name_of_any_length_makes_a_file(store: KernelCache) -> None:
    text, path = store.get(KEY, lambda: ("x" * 999, TEXT), request=REQUEST)
    assert store.find(KEY) == (text, path)


def test_the_folder_may_be_a_link_to_a_private_one(store: KernelCache) -> None:
    (store.root.parent / "disk").mkdir(mode=0o700)
    store.root.symlink_to("disk")
    assert get(store, Builder()) == store.find(KEY)


def test_another_compiler_does_not_see_the_entries(store: KernelCache) -> None:
    get(store, Builder())
    build = Builder()
    get(KernelCache(store.root, "f" * 16), build)
    assert build.runs == 1


def truncate_source(store: KernelCache) -> None:
    source_of(store).write_text(TEXT[:9])


def empty_source(store: KernelCache) -> None:
    source_of(store).write_bytes(b"")


def change_source(store: KernelCache) -> None:
    source_of(store).write_text(TEXT.replace("42", "43"))


def drop_source(store: KernelCache) -> None:
    source_of(store).unlink()


def open_source(store: KernelCache) -> None:
    source_of(store).chmod(0o666)


def link_source(store: KernelCache) -> None:
    path = source_of(store)
    path.rename(store.root / "elsewhere.py")
    path.symlink_to(store.root / "elsewhere.py")


def give_source_away(store: KernelCache) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(source_of(store), 12345, -1)


def truncate_record(store: KernelCache) -> None:
    record_of(store).write_text(record_of(store).read_text()[:40])


def open_record(store: KernelCache) -> None:
    record_of(store).chmod(0o602)


def pipe_record(store: KernelCache) -> None:
    record_of(store).unlink()
    os.mkfifo(record_of(store), 0o600)


def copy_record(store: KernelCache) -> None:
    get(store, Builder("ANSWER = 43\n"), OTHER)
    record_of(store).write_bytes((store.folder / f"{OTHER}.json").read_bytes())


def point_record_elsewhere(store: KernelCache) -> None:
    (store.root / f"x-{COMPILER}.py").write_text(TEXT)
    text = record_of(store).read_text().replace('"gdn', '"../gdn')
    record_of(store).write_text(text)


def write_a_list(store: KernelCache) -> None:
    record_of(store).write_text("[1, 2]")


@pytest.mark.parametrize(
    "harm",
    [
        truncate_source,
        empty_source,
        change_source,
        drop_source,
        open_source,
        link_source,
        give_source_away,
        truncate_record,
        open_record,
        pipe_record,
        copy_record,
        point_record_elsewhere,
        write_a_list,
    ],
)
def test_a_harmed_entry_is_never_returned_but_built_again(
    store: KernelCache, harm: Callable[[KernelCache], None]
) -> None:
    get(store, Builder())
    harm(store)
    build = Builder()
    assert store.find(KEY) is None
    assert get(store, build)[0] == TEXT
    assert build.runs == 1
    # and the entry is whole again
    found = store.find(KEY)
    assert found is not None
    assert found[0] == TEXT
    assert found[1].stat().st_uid == os.geteuid()


@pytest.mark.parametrize("level", ["root", "folder"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_is_refused(
    store: KernelCache, level: str, mode: int
) -> None:
    get(store, Builder())
    folder: Path = getattr(store, level)
    folder.chmod(mode)
    with pytest.raises(CacheError, match=rf"{folder} has mode .*BOLEGEN_CACHE_DIR"):
        get(store, Builder())


def test_a_folder_of_someone_else_is_refused(
    store: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(store, Builder())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(CacheError, match=rf"belongs to user {me}, .*BOLEGEN_CACHE_DIR"):
        get(store, Builder())


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = KernelCache(tmp_path / "file" / "cache", COMPILER)
    with pytest.warns(CacheWarning, match=rf"{store.root} .*BOLEGEN_CACHE_DIR"):
        assert get(store, Builder()) == (TEXT, None)
    # a second one would be an error here
    assert get(store, Builder()) == (TEXT, None)


def test_a_full_disk_costs_one_warning(
    store: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", fail)
    with pytest.warns(CacheWarning, match="No space left"):
        assert get(store, Builder()) == (TEXT, None)
    assert get(store, Builder(), OTHER) == (TEXT, None)


def test_an_error_of_the_compiler_is_the_callers_and_leaves_nothing(store: KernelCache) -> None:
    def build() -> tuple[str, str]:
        raise OSError("the template file is gone")

    with pytest.raises(OSError, match="template file"):
        store.get(KEY, build, request=REQUEST)
    assert list_entries(store.root) == ()


def test_a_lock_that_is_never_released_only_delays(
    store: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    store.folder.mkdir(parents=True, mode=0o700)
    store.root.chmod(0o700)
    with open(store.folder / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert get(store, Builder())[0] == TEXT


RACER = textwrap.dedent(
    """
    import importlib.util, pathlib, sys, time
    source, root, log = sys.argv[1:]
    # the file alone: it needs no torch, which would take seconds to load
    spec = importlib.util.spec_from_file_location("cache", source)
    cache = sys.modules["cache"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cache)
    def build():
        with open(log, "a") as file:
            file.write("built\\n")
        time.sleep(0.3)
        return "name", "ANSWER = 42\\n" * 10000
    text, path = cache.KernelCache(pathlib.Path(root), "0" * 16).get("ab" * 32, build, request={})
    assert text == path.read_text() == "ANSWER = 42\\n" * 10000
    """
)


def test_of_eight_processes_one_builds_and_all_read_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [str(cache.__file__), str(tmp_path / "cache"), str(log)]
    racers = [subprocess.Popen([sys.executable, "-c", RACER, *arguments]) for _ in range(8)]
    assert [racer.wait(timeout=60) for racer in racers] == [0] * 8
    assert log.read_text() == "built\n"
    assert not list(tmp_path.rglob("*.partial"))


def test_entries_are_listed_and_cleared_and_nothing_else_is(store: KernelCache) -> None:
    get(store, Builder())
    get(KernelCache(store.root, "f" * 16), Builder(), OTHER)
    keep = [store.root / "notes.txt", store.folder / "notes.txt"]
    for path in keep:
        path.write_text("mine")
    listed = list_entries(store.root)
    assert {entry.key for entry in listed} == {KEY, OTHER}
    assert listed[0].request == REQUEST
    assert listed[0].path.read_bytes() == TEXT.encode()
    assert {entry.size_bytes for entry in listed} == {len(TEXT.encode())}
    assert clear_entries(store.root) > 2 * len(TEXT)
    assert list_entries(store.root) == ()
    assert sorted(p for p in store.root.rglob("*") if p.is_file()) == sorted(keep)


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list_entries(tmp_path / "none") == ()
    assert clear_entries(tmp_path / "none") == 0

"""Faults of the machine: a cache that is killed, full, read-only or out of time is never wrong."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from bolegen_runtime import CacheWarning, KernelCache, cache, clear_entries, list_entries

KEY, COMPILER = "ab" * 32, "0" * 16
TEXT = "ANSWER = 42\n" * 10_000
NOBODY = 65534

# what each process below starts with: the file alone, which needs no torch
CHILD = """
import fcntl, importlib.util, os, pathlib, sys, time, warnings
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = sys.modules["cache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
store = cache.KernelCache(pathlib.Path(sys.argv[2]), "0" * 16)
TEXT = "ANSWER = 42\\n" * 10000
def get(build=lambda: ("name", TEXT)):
    return store.get("ab" * 32, build, request={"template": "(2,1)"})
"""


def start(code: str, root: Path, **options: object) -> subprocess.Popen[str]:
    """A process that has `get` and the cache in `root`."""
    command = [sys.executable, "-c", CHILD + textwrap.dedent(code), str(cache.__file__), str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


def get(store: KernelCache) -> tuple[str, Path | None, int]:
    """Text and file of an entry, and how often it was built."""
    runs = []

    def build() -> tuple[str, str]:
        runs.append(1)
        return "name", TEXT

    text, path = store.get(KEY, build, request={"template": "(2,1)"})
    return text, path, len(runs)


@pytest.fixture
def store(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache", COMPILER)


def stop_at(place: str) -> str:
    """Code of a process that says so and waits when it comes to a place in writing an entry."""
    return f"""
    def stop():
        print("here", flush=True)
        time.sleep(60)
    replace, fdopen, names = os.replace, os.fdopen, []
    def replacing(source, target):
        names.append(str(target))
        if {place!r} == "before the text":
            stop()
        if {place!r} == "before the record" and len(names) == 2:
            stop()
        replace(source, target)
        if {place!r} == "after the record" and len(names) == 2:
            stop()
    class Half:
        def __init__(self, file):
            self.file = file
        def __enter__(self):
            return self
        def __exit__(self, *_):
            self.file.close()
        def write(self, data):
            self.file.write(data[:len(data) // 2])
            self.file.flush()
            stop()
    os.replace = replacing
    if {place!r} == "half of the text":
        wrap = {{"wb": Half, "rb": lambda file: file}}
        os.fdopen = lambda handle, mode: wrap[mode](fdopen(handle, mode))
    get()
    """


@pytest.mark.parametrize(
    ("place", "whole"),
    [
        ("half of the text", False),
        ("before the text", False),
        ("before the record", False),
        ("after the record", True),
    ],
)
def test_a_process_killed_while_it_writes_leaves_an_entry_or_none(
    store: KernelCache, place: str, whole: bool
) -> None:
    child = start(stop_at(place), store.root)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert (store.find(KEY) is not None) == whole
    # the lock went with the process, and the next one mends what it left
    text, path, runs = get(store)
    assert (text, runs) == (TEXT, 0 if whole else 1)
    assert path is not None
    assert path.read_text() == TEXT
    assert len(list_entries(store.root)) == 1
    clear_entries(store.root)
    assert not [p for p in store.root.rglob("*") if p.is_file()]


def test_a_disk_that_fills_up_in_the_middle_costs_one_warning(store: KernelCache) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(TEXT) // 2, hard))
        with pytest.warns(CacheWarning, match="File too large"):
            assert get(store) == (TEXT, None, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list_entries(store.root) == ()
    assert not list(store.root.rglob("*.partial"))
    assert not list(store.root.rglob("*.py"))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="bolegen-home-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


READ_ONLY = f"""
# root may write anywhere; the interpreter itself may lie where nobody can go, and is loaded now
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print([get() == (TEXT, None) for _ in range(2)], [w.category.__name__ for w in caught])
"""


def test_a_home_that_is_read_only_costs_one_warning(shared: Path) -> None:
    home = shared / "home"
    home.mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    child = start(READ_ONLY, home / ".cache")
    assert child.communicate(timeout=60)[0] == "[True, True] ['CacheWarning']\n"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("when", [0.0, 1.0e9, 4.0e9])
def test_clocks_that_disagree_change_nothing(store: KernelCache, when: float) -> None:
    get(store)
    for path in [*store.folder.iterdir(), store.folder, store.root]:
        os.utime(path, (when, when))
    text, found, runs = get(store)
    assert (text, runs) == (TEXT, 0)
    # a text written by a clock of the past over the entry is found by its contents
    assert found is not None
    found.write_text("ANSWER = 43\n")
    os.utime(found, (when, when))
    assert get(store) == (TEXT, found, 1)


RACE = """
{before}
text, path = get()
assert text == TEXT, len(text)
for _ in range(20):
    {meanwhile}
    text, path = get()
    assert text == TEXT, len(text)
"""


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        ("fcntl.flock = lambda *_: (_ for _ in ()).throw(OSError(37, 'no locks'))", "pass"),
        ("pass", "path and path.unlink(missing_ok=True)"),
        ("pass", "path and path.write_text('ANSWER = 43')"),
        ("pass", "cache.clear_entries(store.root)"),
    ],
    ids=["without locks", "deleting", "spoiling", "clearing"],
)
def test_eight_processes_that_race_read_the_whole_text_or_build_it(
    store: KernelCache, before: str, meanwhile: str
) -> None:
    racers = [start(RACE.format(before=before, meanwhile=meanwhile), store.root) for _ in range(8)]
    for racer in racers:
        racer.communicate(timeout=120)
    assert [racer.returncode for racer in racers] == [0] * 8
    assert get(store)[0] == TEXT

"""Compiled modules on disk: looked up by request, kept and checked by content.

    <cache_dir>/v1-<digest of the compiler>/<request>.json        which file, its SHA-256
                                           /<name>-<sha256>.py    the module's text
                                           /.lock

An entry is returned only where both files are regular files of this user that nobody else can
write, and the text has the SHA-256 of the record; anything else is built again. Files appear by
rename, the record last, so a killed process leaves an entry or none. The lock only saves work:
processes that race without it write the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CacheEntry", "CacheError", "CacheWarning", "KernelCache", "clear_entries", "list_entries",
]  # fmt: skip

LAYOUT = 1
LOCK_SECONDS = 10.0
SETTING = "Settings.cache_dir (BOLEGEN_CACHE_DIR)"
_FOLDER = re.compile(r"v[0-9]+-[0-9a-f]{16}")
_RECORD = re.compile(r"[0-9a-f]{64}\.json")
_SOURCE = re.compile(r"[A-Za-z0-9_]{1,120}-[0-9a-f]{16}\.py")
_LEFT_OVER = re.compile(r"\.[A-Za-z0-9_]+\.partial")
_LOCK = ".lock"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# what reading a damaged record raises
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_log = logging.getLogger(__name__)
_warned: set[Path] = set()


class CacheError(RuntimeError):
    """A cache folder that others can write, or that is someone else's: nothing in it is run."""


class CacheWarning(UserWarning):
    """Modules cannot be kept on disk and are compiled again by every process."""


@dataclass(frozen=True)
class CacheEntry:
    """One compiled module on disk and the request that it answers."""

    key: str  # SHA-256 of the request, hexadecimal
    path: Path
    size_bytes: int
    request: Mapping[str, object]


class KernelCache:
    """The entries below ``root`` that the compiler with digest ``compiler`` made."""

    def __init__(self, root: Path, compiler: str) -> None:
        _expect_hex("compiler", compiler, 16)
        self.root = _as_folder(root)
        self.folder = self.root / f"v{LAYOUT}-{compiler}"

    def get(
        self,
        key: str,
        build: Callable[[], tuple[str, str]],
        *,
        request: Mapping[str, object],
    ) -> tuple[str, Path | None]:
        """The text that answers ``key`` and its file, from ``build() -> (name, text)`` if needed.

        ``request`` is stored for readers. The file is None, with one CacheWarning per folder,
        where the folder cannot be written. Raises CacheError for a folder that is unsafe, and
        what ``build`` raises.
        """
        _expect_hex("key", key, 64)
        try:
            json.dumps(dict(request))
        except (TypeError, ValueError) as error:
            raise ValueError(f"request: expected what JSON can hold: {error}") from error
        try:
            self._open_folder()
        except OSError as error:
            _warn_unwritable(self.root, error)
            return build()[1], None
        if found := self.find(key):
            return found
        with self._lock():
            if found := self.find(key):
                return found
            name, text = build()
            try:
                return text, self._put(key, name, text, request)
            except OSError as error:
                _warn_unwritable(self.root, error)
                return text, None

    def find(self, key: str) -> tuple[str, Path] | None:
        """The checked text that answers ``key`` and its file, None where there is none."""
        _expect_hex("key", key, 64)
        record = self.folder / f"{key}.json"
        if not os.path.lexists(record):
            return None
        try:
            known = json.loads(_read_own(record))
            if known["key"] != key or not _SOURCE.fullmatch(known["file"]):
                raise ValueError(f"{record.name} is not the record of {key}")
            path = self.folder / known["file"]
            data = _read_own(path)
            if hashlib.sha256(data).hexdigest() != known["sha256"]:
                raise ValueError(f"{path.name} has changed since it was written")
            return data.decode(), path
        except (*_UNREADABLE, OSError) as error:
            _log.warning("%s: entry %s is compiled again: %s", self.folder, key[:16], error)
            return None

    def _put(self, key: str, name: str, text: str, request: Mapping[str, object]) -> Path:
        data = text.encode()
        digest = hashlib.sha256(data).hexdigest()
        # a tree of many levels has a name that no file system takes
        path = self.folder / f"{name[:100]}-{digest[:16]}.py"
        record = {"key": key, "file": path.name, "sha256": digest, "request": dict(request)}
        _write_whole(path, data)
        _write_whole(
            self.folder / f"{key}.json", json.dumps(record, indent=1, sort_keys=True).encode()
        )
        return path

    def _open_folder(self) -> None:
        for folder in (self.root, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder's lock, or go on without it after LOCK_SECONDS or where there is none.

        The kernel drops the lock of a process that dies.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(self.folder / _LOCK, flags, 0o600)
        except OSError:
            yield
            return
        try:
            _wait_for(handle)
            yield
        finally:
            os.close(handle)


def _as_folder(root: object) -> Path:
    if not isinstance(root, str | os.PathLike):
        raise ValueError(f"root: expected a path, got {root!r:.40}")
    return Path(root)


def list_entries(root: Path) -> tuple[CacheEntry, ...]:
    """Every readable entry below ``root``, of all compilers; nothing is imported or checked."""
    entries = []
    for path in _files(root):
        if not _RECORD.fullmatch(path.name):
            continue
        with suppress(*_UNREADABLE, OSError):
            known = json.loads(_read_own(path))
            source = path.with_name(known["file"])
            size = source.stat().st_size
            if isinstance(known["request"], dict) and known["key"] == path.stem:
                entries.append(CacheEntry(known["key"], source, size, known["request"]))
    return tuple(sorted(entries, key=lambda entry: entry.path))


def clear_entries(root: Path) -> int:
    """Delete every entry below ``root``, and nothing else; returns how many bytes it freed."""
    freed = 0
    for path in _files(root):
        if path.name != _LOCK and not any(
            pattern.fullmatch(path.name) for pattern in (_RECORD, _SOURCE, _LEFT_OVER)
        ):
            continue
        # another process may be clearing as well
        with suppress(FileNotFoundError):
            size = path.lstat().st_size
            path.unlink()
            freed += size
    for folder in _folders(root):
        with suppress(OSError):
            folder.rmdir()
    return freed


def _folders(root: Path) -> list[Path]:
    try:
        inside = sorted(_as_folder(root).iterdir())
    except FileNotFoundError:
        return []
    return [
        path
        for path in inside
        if _FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def _files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder in _folders(root):
        with suppress(FileNotFoundError):
            found += sorted(folder.iterdir())
    return found


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise CacheError(
            f"cache folder {folder} belongs to user {found.st_uid}, not to {os.geteuid()}; what "
            f"is in it would be run. Set {SETTING} to a folder of your own"
        )
    if found.st_mode & _OTHERS:
        raise CacheError(
            f"cache folder {folder} has mode {stat.S_IMODE(found.st_mode):04o}, so others can "
            f"write what would be run. Run chmod go-w on it, or set {SETTING} to a new folder "
            "inside it"
        )


def _read_own(path: Path) -> bytes:
    """Contents of a regular file that this user owns and nobody else can write."""
    # the file that is checked is the one that is read; a pipe must not block
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
            raise ValueError(
                f"{path.name} belongs to user {found.st_uid} and has mode "
                f"{stat.S_IMODE(found.st_mode):04o}"
            )
        return file.read()


def _write_whole(path: Path, data: bytes) -> None:
    """The file appears with all of its contents, mode 0600, or not at all."""
    handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _wait_for(handle: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while not _take(handle) and time.monotonic() < deadline:
        time.sleep(0.01)


def _take(handle: int) -> bool:
    """Whether there is nothing to wait for: the lock is taken, or the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _warn_unwritable(folder: Path, error: OSError) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(
        f"cache folder {folder} cannot be used ({error.strerror or error}): every process "
        f"compiles its modules again. Set {SETTING} to a folder that can be written",
        CacheWarning,
        stacklevel=2,
    )


def _expect_hex(name: str, value: object, digits: int) -> None:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"{name}: expected {digits} hexadecimal digits, got {value!r:.40}")

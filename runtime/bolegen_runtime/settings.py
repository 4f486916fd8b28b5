"""What the runtime is told from outside; the only place where the environment is read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bolegen_runtime.arguments import expect_kind, expect_path

__all__ = ["Settings"]

CACHE_DIR = "BOLEGEN_CACHE_DIR"
GENERATED_DIR = "BOLEGEN_GENERATED_DIR"
CHECKED = "BOLEGEN_CHECKED"
ENABLE = "BOLEGEN_ENABLE"
TIERS = "BOLEGEN_TIERS"
CHAINS = "BOLEGEN_CHAINS"
OFF = "off"


@dataclass(frozen=True)
class Settings:
    """Where modules come from, and whether they are checked.

    cache_dir: compiled modules are kept below it; None keeps them in memory alone.
    generated_dir: a folder of modules that `bolegen compile` wrote, looked at first; None: none.
    checked: `load` gives a CheckedModule, which runs the recurrence beside every call.
    enable: engine plugins hook into their engine.
    tiers: what the SGLang plugin is told of trees by batch size.
    chains: the SGLang plugin verifies chains as well, which it else passes on.
    """

    cache_dir: Path | None = None
    generated_dir: Path | None = None
    checked: bool = False
    enable: bool = False
    tiers: str = ""
    chains: bool = False

    def __post_init__(self) -> None:
        for name in ("cache_dir", "generated_dir"):
            folder = getattr(self, name)
            if folder is not None:
                object.__setattr__(self, name, expect_path(folder, name))
        expect_kind("checked", self.checked, bool, "True or False")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """BOLEGEN_CACHE_DIR ("off" for none), BOLEGEN_GENERATED_DIR, BOLEGEN_CHECKED,
        BOLEGEN_ENABLE and BOLEGEN_CHAINS (1 or 0), BOLEGEN_TIERS.

        Empty counts as unset; anything but 1 and 0 is a ValueError for the flags. Without a
        cache folder, $XDG_CACHE_HOME/bolegen, then ~/.cache/bolegen. RuntimeWarning where there
        is no home folder either: the cache is then in memory alone.
        """
        environ = os.environ if environ is None else environ
        generated = environ.get(GENERATED_DIR)
        return cls(
            cache_dir=_cache_dir(environ),
            generated_dir=_absolute(generated) if generated else None,
            checked=_flag(environ, CHECKED),
            enable=_flag(environ, ENABLE),
            tiers=environ.get(TIERS, ""),
            chains=_flag(environ, CHAINS),
        )


def _flag(environ: Mapping[str, str], name: str) -> bool:
    given = environ.get(name, "")
    if given not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 1 or 0, got {given!r}")
    return given == "1"


def _cache_dir(environ: Mapping[str, str]) -> Path | None:
    given = environ.get(CACHE_DIR)
    if given:
        return None if given == OFF else _absolute(given)
    base = environ.get("XDG_CACHE_HOME", "")
    # the XDG specification: a relative path is invalid and ignored
    if os.path.isabs(base):
        return Path(base) / "bolegen"
    home = environ.get("HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        warnings.warn(
            f"there is no home folder to keep compiled modules in; set {CACHE_DIR} to a folder, "
            f"or to {OFF} to keep them in memory alone, as is done now",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return Path(home) / ".cache" / "bolegen"


def _absolute(path: str) -> Path:
    """Equal settings for equal folders, whatever the working folder is later."""
    return Path(os.path.abspath(os.path.expanduser(path)))

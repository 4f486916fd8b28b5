"""Which SGLang releases are served, and where their names differ: one row each.

The plugin reads this table, and docs/sglang.md shows it. Facts were read in each release's wheel;
tests/engine holds them to the SGLang that is installed, where one is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bolegen_runtime.sglang.errors import PluginError

__all__ = ["RELEASES", "Release", "find_release", "write_matrix"]

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


@dataclass(frozen=True)
class Release:
    """What is known of one release.

    sizing: the method that reserves memory for states. published: the configuration is in
    SGLang's context, not in server_args alone. padded: it reserves a row for padding as well.
    ngram: its n-gram worker commits states. run: SGLang was run on a GPU with the plugin.
    tiers: zero draft steps are plain decoding, and each number of steps has its own graphs.
    """

    version: str
    sizing: str
    published: bool
    padded: bool = False
    ngram: bool = True
    run: bool = False
    tiers: bool = False


RELEASES = (
    *(
        Release(v, f"{_RUNNER}.handle_max_mamba_cache", False, ngram=v != "0.5.13")
        for v in ("0.5.13", "0.5.14", "0.5.15")
    ),
    Release("0.5.16", f"{_CONFIGURATOR}._handle_max_mamba_cache", False),
    *(
        Release(
            f"0.5.{n}",
            f"{_CONFIGURATOR}._handle_max_mamba_cache",
            True,
            padded=True,
            run=n in (17, 23),
            tiers=n == 23,
        )
        for n in range(17, 24)
    ),
)


def find_release(version: str) -> Release:
    """The row of a version; post-releases are in their release's. PluginError outside."""
    bare = re.sub(r"\.post\d+$", "", version.partition("+")[0])
    for release in RELEASES:
        if release.version == bare:
            return release
    raise PluginError(
        f"sglang: expected {RELEASES[0].version} to {RELEASES[-1].version}, got {version}; "
        "install one of those, or start without BOLEGEN_ENABLE=1"
    )


def write_matrix() -> str:
    """The table as Markdown."""
    lines = ["| SGLang | names checked in its wheel | run on a GPU with the plugin |"]
    lines += ["| --- | --- | --- |"]
    for release in RELEASES:
        lines.append(f"| {release.version} | yes | {'yes' if release.run else 'not yet'} |")
    return "\n".join(lines) + "\n"

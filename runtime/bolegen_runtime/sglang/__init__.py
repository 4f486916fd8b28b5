"""The SGLang plugin: trees of hybrid models verified in parallel, without snapshots.

SGLang calls ``register`` (entry point group ``sglang.srt.plugins``); BOLEGEN_ENABLE=1 turns it on.
Only this package names SGLang, and only inside of functions: see docs/sglang.md.
"""

from bolegen_runtime.sglang.errors import PluginError
from bolegen_runtime.sglang.install import register
from bolegen_runtime.sglang.versions import RELEASES, find_release

__all__ = ["RELEASES", "PluginError", "find_release", "register"]

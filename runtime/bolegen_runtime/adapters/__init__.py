"""Token mixers of transformers in verify's terms: rows, gates and constants, outputs, caches.

    from bolegen_runtime import adapters, load

    layers = adapters.adapt_model(model)
    m = load("(3,3,3)", **layers[0].shapes, dtype="bf16")

Known by their attributes, so that transformers is not imported here: docs/adapters.md.
"""

from bolegen_runtime.adapters.families import FAMILIES, adapt, adapt_model
from bolegen_runtime.adapters.gated_delta import OlmoHybrid, Qwen3Next, Qwen35
from bolegen_runtime.adapters.kimi import Kimi
from bolegen_runtime.adapters.layer import Adapter, AdapterError, Rows
from bolegen_runtime.adapters.lightning import Lightning
from bolegen_runtime.adapters.mamba2 import Mamba2

__all__ = [
    "FAMILIES",
    "Adapter",
    "AdapterError",
    "Kimi",
    "Lightning",
    "Mamba2",
    "OlmoHybrid",
    "Qwen3Next",
    "Qwen35",
    "Rows",
    "adapt",
    "adapt_model",
]

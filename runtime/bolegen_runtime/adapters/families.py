"""Which family a token mixer belongs to."""

from typing import Any

from bolegen_runtime.adapters.gated_delta import OlmoHybrid, Qwen3Next, Qwen35
from bolegen_runtime.adapters.kimi import Kimi
from bolegen_runtime.adapters.layer import Adapter, AdapterError
from bolegen_runtime.adapters.lightning import Lightning
from bolegen_runtime.adapters.mamba2 import Mamba2

__all__ = ["FAMILIES", "adapt", "adapt_model"]

FAMILIES: tuple[type[Adapter], ...] = (Qwen35, Qwen3Next, OlmoHybrid, Kimi, Mamba2, Lightning)


def adapt(token_mixer: Any) -> Adapter:
    """The adapter of one token mixer, known by its attributes.

    Raises AdapterError for a module of no known family, and for a configuration that bolegen
    does not compute.
    """
    for family in FAMILIES:
        if family.recognises(token_mixer):
            return family(token_mixer)
    raise AdapterError(
        f"{type(token_mixer).__name__}: no token mixer of a known family; have {_list()}"
    )


def adapt_model(model: Any) -> tuple[Adapter, ...]:
    """Adapters of all recurrent layers of a model, in order; AdapterError where there are none."""
    found = [
        module
        for module in model.modules()
        if any(family.recognises(module) for family in FAMILIES)
    ]
    if not found:
        raise AdapterError(
            f"{type(model).__name__}: no token mixer of a known family inside; have {_list()}"
        )
    return tuple(adapt(module) for module in found)


def _list() -> str:
    return "; ".join(family.models for family in FAMILIES)

"""Shapes of published models, for ``--model``: one recurrent layer at tensor parallel 1."""

from dataclasses import dataclass

from bolegen.errors import SpecError
from bolegen.ir import GDN, Mixer

__all__ = ["MODELS", "ModelShape", "find_model"]


@dataclass(frozen=True)
class ModelShape:
    """Recurrent layers of a model: how many, and the heads, dims and convolution of each."""

    name: str
    layers: int
    key_heads: int
    value_heads: int
    d_k: int = 128
    d_v: int = 128
    conv: int = 4
    mixer: Mixer = GDN


# layer counts and head counts from the models' published configurations
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-next-80b-a3b", 36, 16, 32),
        ModelShape("qwen3.5-4b", 24, 16, 32),
        ModelShape("qwen3.5-9b", 24, 16, 32),
        ModelShape("qwen3.5-27b", 48, 16, 48),
        ModelShape("qwen3.5-35b-a3b", 30, 16, 32),
        ModelShape("qwen3.5-122b-a10b", 36, 16, 64),
        ModelShape("qwen3.5-397b-a17b", 45, 16, 64),
        ModelShape("olmo-hybrid-7b", 24, 30, 30, 96, 192),
    )
}


def find_model(name: str) -> ModelShape:
    """The shapes of ``name``, in any case; SpecError lists the models there are."""
    key = name.lower()
    if key not in MODELS:
        raise SpecError(f"model {name!r} not known; have {', '.join(MODELS)}")
    return MODELS[key]

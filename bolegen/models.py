"""Shapes of published models, for ``--model``: one recurrent layer at tensor parallel 1."""

from dataclasses import dataclass

from bolegen.errors import SpecError
from bolegen.ir import GDN, GDN_NEG, KDA, KDA_BOUNDED, LIGHTNING, MAMBA2, Mixer

__all__ = ["MODELS", "ModelShape", "find_model"]


@dataclass(frozen=True)
class ModelShape:
    """Recurrent layers of a model: how many, and the mixer, heads, dims and convolution of each.

    Of a Mamba2 layer, key heads are groups, d_k is the state size and d_v the head dimension.
    """

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
        ModelShape("olmo-hybrid-7b", 24, 30, 30, 96, 192, mixer=GDN_NEG),
        ModelShape("kimi-linear-48b-a3b", 20, 32, 32, mixer=KDA),
        ModelShape("kimi-k3", 69, 96, 96, mixer=KDA),
        ModelShape("glm-5.3-flash", 34, 64, 64, mixer=KDA_BOUNDED),
        ModelShape("ling-v3", 35, 32, 32, mixer=KDA_BOUNDED),
        ModelShape("nemotron-h-8b", 24, 8, 128, 128, 64, mixer=MAMBA2),
        ModelShape("nemotron-3-nano-30b-a3b", 23, 8, 64, 128, 64, mixer=MAMBA2),
        ModelShape("nemotron-3-super-120b-a12b", 40, 8, 128, 128, 64, mixer=MAMBA2),
        ModelShape("granite-4.0-h-small", 36, 1, 128, 128, 64, mixer=MAMBA2),
        ModelShape("granite-4.0-h-tiny", 36, 1, 48, 128, 64, mixer=MAMBA2),
        ModelShape("falcon-h1-34b", 72, 2, 32, 256, 128, mixer=MAMBA2),
        ModelShape("falcon-h1-7b", 44, 1, 24, 256, 128, mixer=MAMBA2),
        ModelShape("minimax-text-01", 70, 64, 64, mixer=LIGHTNING),
        ModelShape("minimax-m1", 70, 64, 64, mixer=LIGHTNING),
        ModelShape("ling-2.5-1t", 70, 64, 64, mixer=LIGHTNING),
        ModelShape("ring-2.5-1t", 70, 64, 64, mixer=LIGHTNING),
        ModelShape("ring-flash-linear-2.0", 28, 32, 32, mixer=LIGHTNING),
    )
}


def find_model(name: str) -> ModelShape:
    """The shapes of ``name``, in any case; SpecError lists the models there are."""
    key = name.lower()
    if key not in MODELS:
        raise SpecError(f"model {name!r} not known; have {', '.join(MODELS)}")
    return MODELS[key]

"""A Qwen3.5 model of transformers that the interpreter can run, with weights that tell."""

from typing import Any

import torch

from benchmarks.target_model import build_model, configure

__all__ = ["SHAPES", "tiny_model"]

SHAPES: dict[str, Any] = {"heads": (2, 4), "dims": (16, 16)}
"""Of its Gated DeltaNet layers, as load() takes them."""


def tiny_model(dtype: torch.dtype) -> Any:
    """Three layers, recurrent, attention, recurrent; every mixer and norm sways the logits."""
    config = configure(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    model = build_model(config, device="cpu", dtype=dtype)
    gen = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=gen)
        if name.endswith("A_log"):
            weight.copy_(drawn - 2)  # decays from 0.5 to nearly 1: the prompt is not forgotten
        elif weight.dim() == 1:
            weight.add_(0.3 * drawn)
        else:
            weight.copy_(drawn if "embed" in name else drawn * weight[0].numel() ** -0.5)
    return model

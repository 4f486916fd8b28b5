"""A tiny model of transformers of every family that has an adapter, with weights that tell."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["TINY", "Tiny", "build_tiny"]

VOCABULARY = 40
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
TWO = ["linear_attention", "full_attention"]


@dataclass(frozen=True)
class Tiny:
    """transformers' folder of a family, the stem of its classes, and what its config says."""

    folder: str
    stem: str
    says: dict[str, Any] = field(default_factory=dict)


def _gdn(**more: Any) -> dict[str, Any]:
    return {
        **ATTENTION, "layer_types": TWO, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, **more,
    }  # fmt: skip


def _kimi(**more: Any) -> dict[str, Any]:
    return {
        **ATTENTION, "layer_types": TWO, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "mlp_layer_types": ["dense", "dense"],
        "num_key_value_heads": 2, **more,
    }  # fmt: skip


def _mamba(**more: Any) -> dict[str, Any]:
    return {
        **ATTENTION, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16,
        "mamba_d_head": 16, "mamba_d_conv": 4, "mamba_chunk_size": 8, **more,
    }  # fmt: skip


_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_FALCON = {
    "mamba_d_ssm": 64,
    "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.6],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.1,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.7,
}
TINY = {
    "qwen3.5": Tiny("qwen3_5", "Qwen3_5", _gdn(head_dim=16)),
    "qwen3-next": Tiny(
        "qwen3_next",
        "Qwen3Next",
        _gdn(
            head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
    "olmo-hybrid": Tiny(
        "olmo_hybrid",
        "OlmoHybrid",
        _gdn(linear_num_value_heads=2, linear_num_key_heads=2, linear_value_head_dim=32),
    ),
    "olmo-hybrid, write gates to 1": Tiny(
        "olmo_hybrid", "OlmoHybrid", _gdn(linear_allow_neg_eigval=False)
    ),
    "kimi-linear": Tiny(
        "kimi_linear", "KimiLinear", _kimi(linear_head_dim=16, linear_num_heads=2)
    ),
    "ling": Tiny("bailing_hybrid", "BailingHybrid", _kimi(head_dim=16)),
    "ling, no bound": Tiny(
        "bailing_hybrid", "BailingHybrid", _kimi(head_dim=16, kda_safe_gate=False)
    ),
    "mamba2": Tiny(
        "mamba2",
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "bamba": Tiny("bamba", "Bamba", _mamba(attn_layer_indices=[1])),
    "zamba2": Tiny(
        "zamba2",
        "Zamba2",
        {
            **ATTENTION, "num_key_value_heads": 2, "n_mamba_heads": 4, "mamba_ngroups": 2,
            "mamba_d_state": 16, "layers_block_type": ["linear_attention", "hybrid"],
            "chunk_size": 8,
        },
    ),
    "nemotron-h": Tiny(
        "nemotron_h",
        "NemotronH",
        {
            **ATTENTION, "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "num_hidden_layers": 3, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
            "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
            "time_step_min": 0.05,  # prompts are clamped to it, steps are not
            "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "granite-4.0-h": Tiny(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        _mamba(
            layer_types=TWO, mamba_n_groups=1, shared_intermediate_size=16,
            residual_multiplier=0.6, logits_scaling=1.5, **_EXPERTS,
        ),
    ),
    "falcon-h1": Tiny("falcon_h1", "FalconH1", _mamba(**_FALCON)),
    "falcon-h1, norm before its gate": Tiny(
        "falcon_h1", "FalconH1", _mamba(mamba_rms_norm=True, **_FALCON)
    ),
    "minimax": Tiny(
        "minimax",
        "MiniMax",
        {
            **ATTENTION, "layer_types": TWO, "head_dim": 16, "block_size": 4,
            "linear_attn_alpha_factor": 0.8, "linear_attn_beta_factor": 1.2, **_EXPERTS,
        },
    ),
}  # fmt: skip


def build_tiny(name: str, **changes: Any) -> Any:
    """The ForCausalLM of a family, float32 on the CPU, in evaluation mode."""
    tiny = TINY[name]
    where = f"transformers.models.{tiny.folder}"
    stem = f"{tiny.stem}TextConfig" if tiny.stem == "Qwen3_5" else f"{tiny.stem}Config"
    configs = importlib.import_module(f"{where}.configuration_{tiny.folder}")
    models = importlib.import_module(f"{where}.modeling_{tiny.folder}")
    config = getattr(configs, stem)(**COMMON | tiny.says | changes)
    config._attn_implementation = "eager"
    model = getattr(models, f"{tiny.stem}ForCausalLM")(config).float()
    _draw_weights(model)
    return model.eval().requires_grad_(False)


def _draw_weights(model: Any) -> None:
    """Every mixer and norm sways the logits, and decays from 0.5 to nearly 1 keep the prompt."""
    gen = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=gen)
        if name.endswith("A_log"):
            weight.data.copy_(drawn - 2)
        elif weight.dim() == 1:
            weight.data.add_(0.3 * drawn)
        elif "embed" in name:
            weight.data.copy_(drawn)
        else:
            weight.data.copy_(drawn * weight[0].numel() ** -0.5)

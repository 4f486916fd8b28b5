"""A folder that SGLang loads as a Qwen3.5 text model of a given size, with its dummy weights.

``python shapes.py FOLDER [4b|9b|27b|small] [--layers N] [--positions N]`` writes a configuration
and a tokenizer of numbered words: prompts are drawn as tokens, and nobody reads the answers.
"""

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "describe_model", "main"]

# as the models' published configurations have them; small: eight layers of 9B's heads
SHAPES: dict[str, dict[str, int]] = {
    "4b": {
        "num_hidden_layers": 32, "hidden_size": 2560, "intermediate_size": 9216,
        "num_attention_heads": 16, "linear_num_value_heads": 32,
    },
    "9b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 16, "linear_num_value_heads": 32,
    },
    "27b": {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
        "num_attention_heads": 24, "linear_num_value_heads": 48,
    },
    "small": {
        "num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 16, "linear_num_value_heads": 32,
    },
}  # fmt: skip
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
VOCABULARY = 32_768  # a quarter of a million in the models: the heads would be most of a draft
END = "<|endoftext|>"
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "attention_bias": False,
    "full_attention_interval": len(PERIOD),
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
BYTES = 2  # of an element of the KV cache, bfloat16


def make_config(name: str, layers: int | None, positions: int) -> dict[str, Any]:
    """config.json. ValueError for layers that are no whole periods."""
    count = layers or SHAPES[name]["num_hidden_layers"]
    if count % len(PERIOD):
        raise ValueError(f"--layers: expected a multiple of {len(PERIOD)}, got {count}")
    types = {"num_hidden_layers": count, "layer_types": PERIOD * (count // len(PERIOD))}
    return {**COMMON, **SHAPES[name], **types, "max_position_embeddings": positions}


def make_tokenizer() -> dict[str, Any]:
    """tokenizer.json of as many words as the model has rows."""
    words = [END, *(f"w{number}" for number in range(1, VOCABULARY))]
    end = {"id": 0, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": END,
        },
    }


def describe_model(folder: Path) -> dict[str, Any]:
    """Layers of a folder's model, those that are linear, and the bytes of a token's KV in them."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    linear = config["layer_types"].count("linear_attention")
    heads = config["num_key_value_heads"] * config["head_dim"]
    attention = len(config["layer_types"]) - linear
    return {
        "name": folder.name.removeprefix("m_"),
        "layers": len(config["layer_types"]),
        "linear_layers": linear,
        "vocabulary": config["vocab_size"],
        "kv_bytes": 2 * BYTES * heads * attention,
    }


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", choices=list(SHAPES), default="9b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--positions", type=int, default=8192, help="of the longest context")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    config = make_config(options.shape, options.layers, options.positions)
    tokens = {"eos_token": END, "pad_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, held in (
        ("config", config),
        ("generation_config", {"eos_token_id": 0, "pad_token_id": 0}),
        ("tokenizer", make_tokenizer()),
        ("tokenizer_config", tokens | {"model_max_length": options.positions}),
    ):
        (options.folder / f"{name}.json").write_text(json.dumps(held), "utf-8")


if __name__ == "__main__":
    main()

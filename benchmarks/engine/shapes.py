"""A model folder at a Qwen3.5 model's shapes, with another model's tokenizer.

``python shapes.py FROM TO [4b|9b|27b] [--layers N] [--positions N]``: vocabulary and tokenizer
stay FROM's (a Qwen3.5 text model); weights are SGLang's dummy ones.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "describe_model", "main"]

# as the models' published configurations have them
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
}  # fmt: skip
COMMON = {"num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16}
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
BYTES = 2  # of an element of the KV cache, bfloat16


def shape_config(name: str, layers: int | None) -> dict[str, Any]:
    """What of a config the shape decides. ValueError for layers that are no whole periods."""
    count = layers or SHAPES[name]["num_hidden_layers"]
    if count % len(PERIOD):
        raise ValueError(f"--layers: expected a multiple of {len(PERIOD)}, got {count}")
    types = {"num_hidden_layers": count, "layer_types": PERIOD * (count // len(PERIOD))}
    return {**SHAPES[name], **COMMON, **types}


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
    """Copy the folder without weights and write its config."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", choices=list(SHAPES), default="9b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--positions", type=int, help="tokens of the longest context")
    options = parser.parse_args()
    source, folder = options.source, options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if "safetensors" not in path.name and path.name != "prompts.json":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config |= shape_config(options.shape, options.layers)
    if options.positions:
        config["max_position_embeddings"] = options.positions
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


if __name__ == "__main__":
    main()

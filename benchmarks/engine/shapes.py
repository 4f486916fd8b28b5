"""A model folder at Qwen3.5-9B's shapes, with another model's tokenizer: python shapes.py FROM TO.

Vocabulary and tokenizer stay FROM's (a Qwen3.5 text model); weights are SGLang's dummy ones.
"""

import json
import shutil
import sys
from pathlib import Path

__all__ = ["main"]

LAYERS = 32
SHAPES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    * (LAYERS // 4),
}


def main() -> None:
    """Copy the folder without weights and write its config."""
    source, folder = map(Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if "safetensors" not in path.name and path.name != "prompts.json":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **SHAPES}), "utf-8")


if __name__ == "__main__":
    main()

"""A checkpoint folder as a target model, its MTP draft head, tokenizer and prompts."""
# mypy: allow-untyped-calls

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from .layers import Rope, apply_layer

__all__ = ["FLOAT32_WEIGHTS", "Model", "MtpHead", "build", "load"]

# Stored in float32 whatever the activations' dtype: the decay is exp(-exp(A_log) ...).
FLOAT32_WEIGHTS = ("A_log", "linear_attn.norm.weight")

# transformers renamed the argument in 5.2x
_CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(qwen.Qwen3_5TextModel.forward).parameters
)


class MtpHead(nn.Module):
    """Qwen3.5's multi-token-prediction head: one attention layer that drafts.

    An entry pairs the embedding of token t+1 with the hidden row that ends at token t,
    and predicts token t+2. Parameter names are those of a checkpoint's ``mtp.`` branch.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(size, eps=eps)
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, attention)])
        self.norm = qwen.Qwen3_5RMSNorm(size, eps=eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, mix: Any) -> Tensor:
        """Hidden rows [B, T, hidden] from embeddings and previous hidden rows alike.

        The result feeds the target's ``lm_head`` and, drafting on, the next entry.
        """
        pair = torch.cat(
            [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1
        )
        rows: Tensor = self.norm(apply_layer(self.layers[0], self.fc(pair), mix))
        return rows


@dataclass(frozen=True)
class Model:
    """A target with its draft head; both in evaluation mode on one device."""

    config: Any
    target: Any  # transformers' Qwen3_5ForCausalLM
    head: MtpHead
    tokenizer: Tokenizer | None = None
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of all weights."""
        device: torch.device = self.target.lm_head.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        dtype: torch.dtype = self.target.lm_head.weight.dtype
        return dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., hidden] of token ids."""
        rows: Tensor = self.target.model.embed_tokens(tokens)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of final hidden rows, in the model's dtype."""
        rows: Tensor = self.target.lm_head(hidden)
        return rows

    def forward(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """transformers' own forward: final hidden rows [1, T, hidden]; the cache moves on."""
        out = self.target.model(input_ids=tokens, use_cache=True, **{_CACHE: cache})
        rows: Tensor = out.last_hidden_state
        return rows

    def rope(self, hidden: Tensor, positions: Tensor) -> Rope:
        """Rotary cosines and sines for positions [B, T], in hidden's dtype."""
        rope: Rope = self.target.model.rotary_emb(hidden, positions[None].expand(3, -1, -1))
        return rope


def build(config: dict[str, Any]) -> Model:
    """A model with fresh weights in float32 from a checkpoint's configuration (config.json)."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "dtype", "architectures")}
    settings = Qwen3_5TextConfig(**fields)
    settings._attn_implementation = "sdpa"
    return Model(settings, qwen.Qwen3_5ForCausalLM(settings).float(), MtpHead(settings).float())


def load(folder: Path, *, dtype: torch.dtype, device: str) -> Model:
    """Read a checkpoint folder: config.json, *.safetensors, tokenizer.json, prompts.json.

    Raises FileNotFoundError naming the folder when it holds no checkpoint.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{folder} is no checkpoint: expected config.json and "
            "*.safetensors there; name a folder that has them with --model"
        )
    model = build(json.loads((folder / "config.json").read_text()))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    model.target.load_state_dict({k: v for k, v in weights.items() if not k.startswith("mtp.")})
    model.head.load_state_dict(
        {k.removeprefix("mtp."): v for k, v in weights.items() if k.startswith("mtp.")}
    )
    for part in (model.target, model.head):
        part.to(device).eval().requires_grad_(False)
        for name, parameter in part.named_parameters():
            if not name.endswith(FLOAT32_WEIGHTS):
                parameter.data = parameter.data.to(dtype)
    prompts = tuple(tuple(p) for p in json.loads((folder / "prompts.json").read_text()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Model(model.config, model.target, model.head, tokenizer, prompts)

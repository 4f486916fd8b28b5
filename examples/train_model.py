"""Train the example's small hybrid target and its MTP draft head on one GPU, in minutes.

    python -m examples.train_model OUT                                  # about 3 minutes
    python -m examples.train_model OUT --max-steps 3 --batch 2 --text examples   # a CPU trial

The target has Qwen3.5's text architecture (three Gated DeltaNet layers and one of full
attention) and 2.8 M parameters; the text is the Python found on the machine. The head
learns from the target's own probabilities, for several draft steps: step s reads its own
output of step s-1, as it does when drafting a tree. It never changes the target.

OUT receives config.json, tokenizer.json, model.safetensors (bfloat16), prompts.json (cut
from this repository, which is not in the training text) and training.json (the figures).
"""
# mypy: allow-untyped-calls

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from examples.tree_decoding.model import FLOAT32_WEIGHTS, Model, build
from examples.tree_decoding.sequence import CHUNK, initialise, run_drafts, run_target

CONFIG: dict[str, Any] = {
    # names and meaning: transformers' Qwen3_5TextConfig
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
END_OF_TEXT = "<|endoftext|>"
HELD_OUT = {
    "argparse.py",
    "difflib.py",
    "heapq.py",
    "optparse.py",
    "shlex.py",
    "statistics.py",
    "tarfile.py",
    "textwrap.py",
    "zipfile.py",
}
DRAFT_WEIGHTS = (1.0, 0.7, 0.5, 0.35)  # of the loss, by draft step
REPOSITORY = Path(__file__).resolve().parent.parent


def read_sources(roots: Sequence[Path], limit: int) -> tuple[list[str], list[str]]:
    """Python files under the roots, at most ``limit`` characters: (training, held out)."""
    train: list[str] = []
    held: list[str] = []
    total = 0
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if path.name in HELD_OUT:
            held.append(text)
        elif total < limit and 200 < len(text) < 400_000:
            train.append(text)
            total += len(text)
    return train, held


def train_tokenizer(texts: Sequence[str], limit: int = 8 << 20) -> Tokenizer:
    """A byte-level BPE over about ``limit`` characters, drawn evenly from the texts."""
    stride = max(1, sum(map(len, texts)) // limit)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """All texts as one row of token ids, int32, each ended by the end-of-text token."""
    batches = (texts[at : at + 512] for at in range(0, len(texts), 512))
    return torch.cat(
        [
            torch.tensor([*row.ids, CONFIG["eos_token_id"]], dtype=torch.int32)
            for batch in batches
            for row in tokenizer.encode_batch(batch)
        ]
    )


def cut_prompts(tokenizer: Tokenizer, count: int = 32, length: int = 96) -> list[list[int]]:
    """Evenly spaced pieces of this repository's own sources, as token ids."""
    texts = [
        path.read_text("utf-8")
        for folder in ("bolegen", "runtime", "examples")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
    ]
    ids = encode(tokenizer, texts)
    starts = torch.linspace(0, len(ids) - length - 1, count).long().tolist()
    return [ids[at : at + length].tolist() for at in starts]


def losses(model: Model, ids: Tensor) -> list[Tensor]:
    """Cross entropies [nats]: the target's against the text, the drafts' against the target."""
    hidden = run_target(model, ids)
    logits = model.logits(hidden).float()
    result = [functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())]
    wanted = logits.detach().softmax(-1)
    for step, draft in enumerate(run_drafts(model, ids, hidden, len(DRAFT_WEIGHTS)), 1):
        result.append(
            functional.cross_entropy(draft.float().flatten(0, 1), wanted[:, step:].flatten(0, 1))
        )
    return result


def train(model: Model, data: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """AdamW on random windows until the time or the steps are spent."""
    parameters = [*model.target.parameters(), *model.head.parameters()]
    matrices = [p for p in parameters if p.dim() == 2]
    vectors = [p for p in parameters if p.dim() != 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=data.is_cuda,
    )
    window = torch.arange(options.length, device=data.device)
    start, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        for group in optimiser.param_groups:
            group["lr"] = options.rate * min(1, (step + 1) / 100) * max(0.02, 1 - done)
        at = torch.randint(len(data) - options.length, (options.batch, 1), device=data.device)
        with torch.autocast(data.device.type, dtype=torch.bfloat16, enabled=data.is_cuda):
            terms = losses(model, data[at + window].long())
        loss = terms[0] + sum(w * t for w, t in zip(DRAFT_WEIGHTS, terms[1:], strict=True))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        seconds = time.monotonic() - start
        done = max(seconds / options.seconds, step / options.max_steps)
        if step % 100 == 1 or done >= 1:
            print(
                f"step {step:5}  {seconds:6.1f} s  loss",
                " ".join(f"{t.item():.3f}" for t in terms),
                flush=True,
            )
    return {"steps": step, "tokens": step * options.batch * options.length, "seconds": seconds}


@torch.no_grad()
def evaluate(model: Model, data: Tensor, length: int, rows: int = 256) -> dict[str, Any]:
    """Held-out loss, and how often the target's greedy choice is among a draft step's top k."""
    count = min(rows, len(data) // length)
    totals: dict[str, float] = {}
    for ids in data[: count * length].view(count, length).long().split(8):
        hidden = run_target(model, ids)
        logits = model.logits(hidden).float()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        figures = {"held_out_loss": float(loss)}
        choice = logits.argmax(-1, keepdim=True)
        for step, draft in enumerate(run_drafts(model, ids, hidden, len(DRAFT_WEIGHTS)), 1):
            hit = draft.topk(8).indices == choice[:, step:]
            for k in (1, 2, 3, 8):
                figures[f"step_{step}_top_{k}"] = float(hit[..., :k].any(-1).float().mean())
        for name, value in figures.items():
            totals[name] = totals.get(name, 0.0) + value * len(ids) / count
    return {name: round(value, 4) for name, value in totals.items()}


def round_weights(model: Model) -> dict[str, Tensor]:
    """Round the weights in place to what is saved, and return them by checkpoint name."""
    saved = {}
    for prefix, part in (("", model.target), ("mtp.", model.head)):
        for name, weight in part.named_parameters():
            keep = name.endswith(FLOAT32_WEIGHTS)
            saved[prefix + name] = weight.detach().to(torch.float32 if keep else torch.bfloat16)
            weight.data.copy_(saved[prefix + name])
    return saved


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="time to train [s]")
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--length", type=int, default=512, help=f"tokens a window, by {CHUNK}")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        help="folder of Python sources, repeatable (default: stdlib and installed packages)",
    )
    parser.add_argument("--text-mib", type=float, default=160.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.length < CHUNK or options.length % CHUNK:
        parser.error(f"--length is a multiple of {CHUNK}, not {options.length}")
    return options


def main() -> None:
    """Read text, train, measure, save."""
    options = parse_arguments()
    begin = time.monotonic()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    roots = options.text or [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib")]
    texts, held = read_sources(roots, int(options.text_mib * 2**20))
    if not texts:
        raise SystemExit(f"no Python sources under {', '.join(map(str, roots))}; see --text")
    tokenizer = train_tokenizer(texts)
    data = encode(tokenizer, texts).to(options.device)
    unseen = encode(tokenizer, held or texts[-1:]).to(options.device)
    print(
        f"text: {len(texts)} files, {len(data) / 1e6:.1f} M tokens; held out "
        f"{len(unseen) / 1e6:.2f} M; {time.monotonic() - begin:.0f} s",
        flush=True,
    )

    model = build(CONFIG)
    initialise(model)
    model.target.to(options.device)
    model.head.to(options.device)
    report: dict[str, Any] = train(model, data, options)
    weights = round_weights(model)
    report.update(evaluate(model, unseen, options.length))

    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (options.out / "prompts.json").write_text(json.dumps(cut_prompts(tokenizer)) + "\n")
    (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    tokenizer.save(str(options.out / "tokenizer.json"), pretty=False)
    save_file(
        {k: v.contiguous().cpu() for k, v in weights.items()},
        options.out / "model.safetensors",
        metadata={"format": "pt"},
    )
    print(json.dumps(report, indent=1))
    print(
        f"{sum(w.numel() for w in weights.values()) / 1e6:.2f} M parameters in {options.out}; "
        f"{time.monotonic() - begin:.0f} s in all"
    )


if __name__ == "__main__":
    main()

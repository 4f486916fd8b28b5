"""One SGLang engine in one mode: tokens, accepted lengths, times and memory, as JSON.

An engine is a process of its own. Several may start together on one GPU; ``--peers`` makes each
wait until all are up, and a lock then lets one measure at a time.
"""

import argparse
import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine import simulated
from benchmarks.engine.kernels import measure_passes
from benchmarks.engine.margins import measure_leads
from benchmarks.engine.measures import converse, measure_batch, sample
from benchmarks.engine.points import list_points, measure_points
from benchmarks.engine.shapes import describe_model

__all__ = ["alone", "engine_arguments", "main", "read_versions", "set_environment"]


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="NAME.json; NAME is the label")
    parser.add_argument("--tree", help="steps,topk,nodes of NEXTN, or ngram,topk,nodes")
    parser.add_argument("--plugin", action="store_true", help="with BOLEGEN_ENABLE=1")
    parser.add_argument("--tiers", help="BOLEGEN_TIERS, for the tree's steps and topk")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--contexts", help="in place of --batch: TOKENS:BATCH,BATCH ...")
    parser.add_argument("--kernels", help="TOKENS:BATCH,BATCH of passes taken apart by kernel")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--margins", action="store_true", help="leads of plain decoding's tokens")
    parser.add_argument("--samples", type=int, default=0, help="answers at temperature 1")
    parser.add_argument("--turns", type=int, default=0, help="of conversations, cache on")
    simulated.add_option(parser)
    parser.add_argument("--peers", type=int, default=0, help="engines to wait for")
    parser.add_argument("--extra", default="{}", help="JSON of further engine arguments")
    return parser.parse_args()


def engine_arguments(options: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    """What both releases take; attention in Triton, since trees need it on Hopper."""
    said: dict[str, Any] = {
        "model_path": str(options.model),
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": options.turns == 0,
        "max_running_requests": options.requests,
        "cuda_graph_bs_decode": sorted({1, *sizes}),
        "disable_prefill_cuda_graph": True,
        "random_seed": 1,
        "skip_server_warmup": True,
        "log_level": "info",
    }
    if options.tree:
        first, topk, nodes = options.tree.split(",")
        said["speculative_num_draft_tokens"] = int(nodes)
        if first == "ngram":
            said |= {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_max_bfs_breadth": int(topk),
            }
        else:
            said |= {
                "speculative_algorithm": "NEXTN",
                "speculative_draft_model_path": str(options.model),
                "speculative_num_steps": int(first),
                "speculative_eagle_topk": int(topk),
            }
    if options.tiers:
        said["speculative_adaptive"] = True
        del said["speculative_num_draft_tokens"]
    said.update(json.loads(options.extra))
    return said


def set_environment(options: argparse.Namespace) -> None:
    """What the plugin and the engine read before they start."""
    os.environ["BOLEGEN_ENABLE"] = "1" if options.plugin else "0"
    os.environ["BOLEGEN_TIERS"] = options.tiers or ""
    os.environ["BOLEGEN_CHAINS"] = "1"  # only the plugin reads it, and for topk 1
    os.environ |= simulated.environment(options.accept)


def read_versions() -> dict[str, str]:
    """What an engine runs on; imports it."""
    import sglang
    import torch
    import triton

    found = {each.__name__: str(each.__version__) for each in (sglang, torch, triton)}
    return {"device": torch.cuda.get_device_name(), **found}


def make_prompts(model: Path, count: int, length: int = 64) -> list[list[int]]:
    """Prompts that lie beside the model, or random tokens."""
    path = model / "prompts.json"
    if path.exists():
        held: list[list[int]] = [p[:length] for p in json.loads(path.read_text("utf-8"))]
        return [held[i % len(held)] for i in range(count)]
    numbers = random.Random(0)
    return [[numbers.randrange(10, 30_000) for _ in range(length)] for _ in range(count)]


@contextmanager
def alone(options: argparse.Namespace) -> Iterator[None]:
    """Once all peers are up, one at a time, plain decoding first; at once without peers."""
    if not options.peers:
        yield
        return
    folder = options.out.parent
    options.out.with_suffix(".ready").touch()
    wait_until(lambda: len(list(folder.glob("*.ready"))) >= options.peers)
    plain = folder / "ar.json"
    if plain != options.out and plain.with_suffix(".ready").exists():
        # a run that is cut short has what the others' answers are compared with
        wait_until(lambda: plain.exists() or plain.with_suffix(".rc").exists())
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_until(holds: Callable[[], bool]) -> None:
    """Look again and again, for 400 s at most."""
    until = time.monotonic() + 400
    while not holds() and time.monotonic() < until:
        time.sleep(0.2)


def main() -> None:
    """Start, measure, write."""
    options = read_options()
    set_environment(options)
    import sglang

    sizes = list_sizes(options)
    begin = time.monotonic()
    engine = sglang.Engine(**engine_arguments(options, sizes))
    record: dict[str, Any] = {
        "label": options.out.stem,
        "plugin": options.plugin,
        "tree": options.tree,
        "tiers": options.tiers,
        "versions": read_versions(),
        "accept": options.accept,
        "start_s": time.monotonic() - begin,
    }
    prompts = make_prompts(options.model, max(sizes))
    with alone(options):
        if options.contexts:
            record |= decode(engine, options)
        else:
            record |= run(engine, prompts, sizes, options)
        state = engine.get_server_info()["internal_states"][0]
        for name, said in (("memory", "memory_usage"), ("bolegen", "bolegen"), ("probe", "probe")):
            record[name] = state.get(said)
        options.out.write_text(json.dumps(record, default=str), "utf-8")
        engine.shutdown()


def list_sizes(options: argparse.Namespace) -> list[int]:
    """Batch sizes that the engine shall have graphs of."""
    if not options.contexts:
        return [int(size) for size in options.batch.split(",")]
    said = f"{options.contexts} {options.kernels or ''}"
    return sorted({batch for _, batch in list_points(said)})


def decode(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Speeds by context and batch, and passes by kernel where they were asked for and told."""

    def draw(batch: int, context: int) -> list[list[int]]:
        return make_prompts(options.model, batch, context)

    points = list_points(options.contexts)
    found: dict[str, Any] = {"model": describe_model(options.model)}
    found["runs"] = measure_points(
        engine, points, draw, new_tokens=options.new_tokens, repeats=options.repeats
    )
    if options.kernels:
        passes = list_points(options.kernels)
        layers = found["model"]["linear_layers"]
        try:
            found["passes"] = measure_passes(engine, passes, draw, layers)
        # speeds are not lost for what no profiler could tell
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            found["no_passes"] = f"{type(error).__name__}: {error}"
    return found


def run(
    engine: Any, prompts: list[list[int]], sizes: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Everything that was asked for."""
    new = options.new_tokens
    found: dict[str, Any] = {}
    if options.turns:
        talks = converse(engine, prompts, options.turns, new)
        for talk in talks:
            said = talk.pop("prompts"), talk["output_ids"]
            if options.margins:
                talk["leads"] = measure_leads(engine, *said)
        found["talks"] = talks
        return found
    found["runs"] = [measure_batch(engine, prompts[:n], new, options.repeats) for n in sizes]
    for run in found["runs"] if options.margins else ():
        run["leads"] = measure_leads(engine, prompts[: run["batch"]], run["output_ids"])
    if options.samples:
        found["samples"] = sample(engine, prompts[:2], options.samples)
    return found


if __name__ == "__main__":
    main()

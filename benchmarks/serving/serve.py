"""One SGLang engine under loads of conversations, as JSON: python serve.py --out NAME.json ...

The prefix cache is on, and empty when a load begins. The memory that engines may take is said by
``--extra``: mem_fraction_static, max_total_tokens, max_mamba_cache_size.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from benchmarks.engine import simulated
from benchmarks.engine.drive import alone, engine_arguments, read_versions, set_environment
from benchmarks.engine.margins import measure_leads
from benchmarks.serving.load import Clock, Request, RequestError, offer
from benchmarks.serving.talks import Shape, Talk, draw_talks, read_text

__all__ = ["COLUMNS", "main", "measure"]

COLUMNS = [field.name for field in fields(Request)][:-1]
MEMORY_LINES = re.compile(
    r"(?:Mamba Cache is allocated|GDN ReplaySSM ring|KV Cache is allocated|Memory pool end"
    r"|bolegen verifies|bolegen has nothing|max_total_num_tokens=).*"
)
WARM_TALKS, WARM_SEED = 8, -1
FLUSHES = 50
Record = dict[str, Any]


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="NAME.json; NAME is the label")
    parser.add_argument("--log", type=Path, help="where this process's output goes")
    parser.add_argument("--tree", help="steps,topk,nodes of NEXTN, or ngram,topk,nodes")
    parser.add_argument("--plugin", action="store_true", help="with BOLEGEN_ENABLE=1")
    parser.add_argument("--tiers", help="BOLEGEN_TIERS, for the tree's steps and topk")
    parser.add_argument("--replayssm", action="store_true", help="SGLang's, for chains")
    parser.add_argument("--margins", action="store_true", help="of plain decoding's answers")
    simulated.add_option(parser)
    parser.add_argument("--requests", type=int, default=16, help="running at once, at most")
    parser.add_argument("--rate", type=float, required=True, help="conversations a second")
    parser.add_argument("--loads", default="0.3,0.6,0.9", help="fractions of the rate")
    parser.add_argument("--seeds", default="1", help="each load is held once for each")
    for field in fields(Shape):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    parser.add_argument("--peers", type=int, default=0, help="engines to wait for")
    parser.add_argument("--extra", default="{}", help="JSON of further engine arguments")
    return parser.parse_args(arguments)


def read_shape(options: argparse.Namespace) -> Shape:
    """The conversations that the command line asks for."""
    return Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})


def describe(options: argparse.Namespace) -> Record:
    """What every engine of a comparison must have in common."""
    return {
        "model": options.model.name,
        "shape": asdict(read_shape(options)),
        "requests": options.requests,
        "rate": options.rate,
        "loads": [float(load) for load in options.loads.split(",")],
        "seeds": [int(seed) for seed in options.seeds.split(",")],
        "extra": json.loads(options.extra),
    }


def start(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    """The engine, and the versions of what it runs on."""
    set_environment(options)
    import sglang

    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < options.requests]
    said = engine_arguments(options, [*sizes, options.requests])
    if options.replayssm:
        said["enable_linear_replayssm_spec"] = True
    return sglang.Engine(**said), read_versions()


def measure(
    engine: Any, options: argparse.Namespace, clock: Clock = time.perf_counter
) -> list[Record]:
    """Every load and seed, after a warm-up with conversations of its own."""
    settings, text = describe(options), read_text(options.model)
    shape = read_shape(options)
    peak = options.rate * max(settings["loads"])
    hold(engine, draw_talks(shape, peak, WARM_SEED, text)[:WARM_TALKS], clock)
    runs = []
    for seed in settings["seeds"]:
        for load in settings["loads"]:
            talks = draw_talks(shape, options.rate * load, seed, text)
            requests = hold(engine, talks, clock)
            runs.append({
                "load": load, "seed": seed, "columns": COLUMNS,
                "rows": [[_short(v) for v in astuple(r)[:-1]] for r in requests],
                "tokens": [len(r.output_ids) for r in requests],
                "output_ids": [r.output_ids for r in requests],
            })  # fmt: skip
            if options.margins:
                runs[-1]["prompts"] = list_prompts(talks, requests)
    return runs


def hold(engine: Any, talks: tuple[Talk, ...], clock: Clock) -> list[Request]:
    """One load on an empty prefix cache."""
    # the scheduler may lag behind the last answer by a batch
    for _ in range(FLUSHES):
        if engine.flush_cache().success:
            break
        time.sleep(0.1)
    else:
        raise RequestError("the prefix cache was not emptied: the engine is not idle")
    found: list[Request] = engine.loop.run_until_complete(offer(engine, talks, clock))
    return found


def list_prompts(talks: tuple[Talk, ...], requests: list[Request]) -> list[list[int]]:
    """The prompt of each request."""
    answers: dict[int, list[list[int]]] = {}
    prompts = []
    for request in requests:
        held = answers.setdefault(request.talk, [])
        prompts.append(talks[request.talk].prompt(held))
        held.append(request.output_ids)
    return prompts


def add_leads(engine: Any, runs: list[Record]) -> None:
    """Leads in place of prompts, each prompt with its answer asked once."""
    asked = {
        (tuple(prompt), tuple(answer)): None
        for run in runs
        for prompt, answer in zip(run["prompts"], run["output_ids"], strict=True)
    }
    leads = measure_leads(engine, [list(p) for p, _ in asked], [list(a) for _, a in asked])
    found = dict(zip(asked, leads, strict=True))
    for run in runs:
        pairs = zip(run.pop("prompts"), run["output_ids"], strict=True)
        run["leads"] = [found[tuple(prompt), tuple(answer)] for prompt, answer in pairs]


def _short(value: float) -> float:
    return round(value, 6)


def main(arguments: list[str] | None = None) -> None:
    """Start, measure, write; exit 1, without a file, for a request that failed."""
    options = read_options(arguments)
    begin = time.monotonic()
    engine, versions = start(options)
    record: Record = {
        "label": options.out.stem,
        "plugin": options.plugin,
        "tree": options.tree,
        "tiers": options.tiers,
        "replayssm": options.replayssm,
        "accept": options.accept,
        "versions": versions,
        "settings": describe(options),
        "start_s": round(time.monotonic() - begin, 1),
    }
    with alone(options):
        try:
            record["runs"] = measure(engine, options)
            if options.margins:
                add_leads(engine, record["runs"])
            state = engine.get_server_info()["internal_states"][0]
        except RequestError as error:
            sys.exit(f"bolegen: {record['label']}: {error}")
        finally:
            engine.shutdown()
    record["running"] = state["effective_max_running_requests_per_dp"]
    record["memory"] = state["memory_usage"]
    record["bolegen"] = state.get("bolegen")
    said = options.log.read_text("utf-8", errors="replace") if options.log else ""
    record["memory_lines"] = list(dict.fromkeys(MEMORY_LINES.findall(said)))
    options.out.write_text(json.dumps(record, default=str), "utf-8")


if __name__ == "__main__":
    main()

# mypy: allow-untyped-calls
"""Profile a Qwen3.5-9B-shaped target on this GPU: ``python benchmarks/profile_target.py``.

The model is transformers' own, from its configuration, with random weights (target_model.py);
a pass is everything but sampling (hybrid_target.py), each a CUDA graph. Checks the target's own
kernels first; then finds the budgets, measures each again with the next larger total, and exits
with 1 where the budget was not the knee. Writes docs/budget-h200.json, which
bolegen_runtime.load_profile reads, and the table of docs/budget.md.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

if importlib.util.find_spec("transformers") is None:
    raise SystemExit(
        "profile_target: the target is transformers' Qwen3.5 and transformers is not installed: "
        "run `pip install '.[hf]'`"
    )

import torch  # noqa: E402
import transformers  # noqa: E402

from benchmarks.budget_page import PAGE  # noqa: E402
from benchmarks.decode_kernels import decode_step  # noqa: E402
from benchmarks.hybrid_target import HybridTarget, attend, heap_tree  # noqa: E402
from benchmarks.pages import fill, table  # noqa: E402
from benchmarks.target_model import build_model, configure, fuse_norms  # noqa: E402
from benchmarks.timing import replay_times, spin_up  # noqa: E402
from bolegen_runtime import (  # noqa: E402
    Clock,
    CudaClock,
    Pass,
    Profile,
    ProfileEntry,
    Settings,
    load,
    plan_nodes,
    profile_target,
)

__all__ = [
    "Recheck",
    "check_attention",
    "check_decode",
    "describe_target",
    "main",
    "recheck",
    "show",
]

Recheck = dict[tuple[int, int], tuple[float, float, float]]
"""By batch and context: slowdown of the budget and of the next total, and the largest spread."""


def main() -> int:
    """0 where the checks passed and each budget is confirmed as the knee."""
    options = _parse()
    if not torch.cuda.is_available():
        raise SystemExit("profile_target: no CUDA device here")
    start = time.monotonic()
    target = _build(options)
    print(f"model built after {time.monotonic() - start:.0f} s", flush=True)
    print("checks, error over limit:", _check(target), flush=True)
    spin_up()
    clock = CudaClock(replays=options.replays)

    def within_limit(buckets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for at, bucket in enumerate(buckets, 1):
            if time.monotonic() - start > options.limit_s:
                print(f"out of time: {len(buckets) - at + 1} buckets are left out")
                return
            print(f"{at} of {len(buckets)}: batch, context {bucket}", flush=True)
            yield bucket

    profile = profile_target(
        target.prepare,
        batches=options.batches,
        contexts=options.contexts,
        templates={"any:64": options.widths},
        epsilon=options.epsilon,
        target=describe_target(target),
        clock=clock,
        progress=within_limit,
    )
    profile.save(options.out)
    confirmed = recheck(target.prepare, profile, clock)
    page = show(profile, confirmed) + "\n" + _plan_times()
    print(page)
    print(f"{time.monotonic() - start:.0f} s, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    PAGE.write_text(fill(PAGE.read_text("utf-8"), "profile", page), "utf-8")
    wrong = [e for e in profile.entries if not _is_confirmed(e, confirmed)]
    for entry in wrong:
        print(f"not the knee when measured again: batch {entry.batch}, context {entry.context}")
    return int(bool(wrong))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    )
    parser.add_argument("--modules", type=int, nargs="+", default=[16, 64], metavar="N")
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=160, help="start no bucket after this")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/budget-h200.json")
    return parser.parse_args()


def _build(options: argparse.Namespace) -> HybridTarget:
    settings = Settings(generated_dir=ROOT / "generated")
    modules = {n: load(f"any:{n}", depth=8, settings=settings) for n in options.modules}
    model = fuse_norms(build_model(configure(), device="cuda", dtype=torch.bfloat16))
    return HybridTarget(model, modules, batch=max(options.batches), context=max(options.contexts))


def describe_target(target: HybridTarget) -> dict[str, str]:
    """What was measured, for the profile."""
    modules = (f"any:{n} {module.MODULE.digest}" for n, module in target.modules.items())
    return {
        "model": "Qwen3.5-9B's shapes, random weights, bf16",
        "class": f"{type(target.model).__name__}({type(target.config).__name__})",
        "transformers": transformers.__version__,
        "modules": " ".join(modules),
    }


def _check(target: HybridTarget) -> dict[str, float]:
    """Error over limit of the parts that no other test covers. SystemExit where one is over 1."""
    found = {"attention": check_attention(str(target.device))}
    for n, module in target.modules.items():
        found[f"decode, any:{n}"] = check_decode(target, module)
    if not max(found.values()) <= 1:
        raise SystemExit(f"profile_target: error over limit {found}")
    return {name: round(ratio, 4) for name, ratio in found.items()}


def check_attention(device: str, *, length: int = 1024, dim: int = 256) -> float:
    """attend() on a small tree against the definition in float32; the limit is 1 %."""
    gen = torch.Generator(device).manual_seed(1)
    dtype = torch.bfloat16

    def draw(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(2, heads, rows, dim, generator=gen, device=device).to(dtype)

    tree = heap_tree(6)
    sees = torch.eye(6, dtype=torch.bool, device=device)
    for node in range(1, 6):
        sees[node] |= sees[tree[node]]
    q, k, v = draw(4, 6), draw(2, 6), draw(2, 6)
    keys, values = draw(2, length), draw(2, length)
    out = attend(q, k, v, keys, values, sees)
    all_keys, all_values = (
        torch.cat(pair, 2).float().repeat_interleave(2, 1) for pair in ((keys, k), (values, v))
    )
    mask = torch.cat([sees.new_ones(6, length), sees], 1)
    scores = (q.float() @ all_keys.mT) * dim**-0.5
    want = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ all_values
    return float((out.float() - want).norm() / want.norm()) / 1e-2


def check_decode(target: HybridTarget, module: ModuleType) -> float:
    """One token by the decode kernels against verify and commit of a tree of one node.

    States must agree to 1e-4 (a rounding tie of the convolution may fall either way), outputs and
    windows to 1 %; the largest error over its limit. The pools are left as they were.
    """
    mixer = target.adapters[0].token_mixer
    gen = torch.Generator(target.device).manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=target.device).to(target.dtype)

    rows, heads = 1, target.heads
    x, a, b = draw(rows, 1, mixer.conv_dim), draw(rows, 1, heads[1]), draw(rows, 1, heads[1])
    weights = (mixer.conv1d.weight[:, 0], mixer.A_log, mixer.dt_bias)
    slots = torch.zeros(rows, dtype=torch.int64, device=target.device)
    state, window = target.states[:1, :1].clone(), target.windows[:1, :1].clone()
    other, moved = state.clone(), window.clone()
    out = decode_step(x, a, b, *weights, other[0], moved[0], slots, heads=heads)
    factors = module.allocate(rows, 1, target.device)
    parents = torch.full((rows, 1), -1, dtype=torch.int32, device=target.device)
    want = module.verify(x, a, b, *weights, state[0], window[0], slots, factors, parents=parents)
    module.commit(factors, state, window, slots, slots, parents=parents)
    pairs = ((out, want, 1e-2), (moved, window, 1e-2), (other, state, 1e-4))
    return max(
        float((mine.float() - right.float()).norm() / right.float().norm()) / limit
        for mine, right, limit in pairs
    )


def recheck(
    prepare: Callable[[Pass], Callable[[], object]], profile: Profile, clock: Clock
) -> Recheck:
    """Decode, the budget and the next total of each entry once more, in new graphs."""
    found: Recheck = {}
    for entry in profile.entries:
        decode = clock(prepare(Pass(entry.batch, entry.context, None, entry.batch)))
        slow, spread = [], [max(decode) / min(decode)]
        for total in (entry.budget, _next_total(entry)):
            if not total:
                slow.append(float("nan"))
                continue
            times = clock(prepare(Pass(entry.batch, entry.context, entry.template, total)))
            slow.append(statistics.median(times) / statistics.median(decode))
            spread.append(max(times) / min(times))
        found[entry.batch, entry.context] = (slow[0], slow[1], max(spread))
    return found


def _next_total(entry: ProfileEntry) -> int:
    """The total after the budget, 0 where there is none."""
    return next((n for n in entry.totals if n > entry.budget), 0)


def _is_confirmed(entry: ProfileEntry, confirmed: Recheck) -> bool:
    """Within the limit at the budget and over it at the next total, give or take one percent."""
    slow, slower, _ = confirmed[entry.batch, entry.context]
    limit = 1 + entry.epsilon
    return not slow > limit + 0.01 and not slower < limit - 0.01


def show(profile: Profile, confirmed: Recheck) -> str:
    """The profile as a table: slowdown over decode by nodes a request, and the budget."""
    where, target = profile.environment, profile.target
    widths = [n // profile.entries[0].batch for n in profile.entries[0].totals]
    head = [
        "batch",
        "context",
        "decode ms",
        *map(str, widths),
        "budget",
        "again",
        "next",
        "spread",
    ]
    rows = []
    for e in profile.entries:
        slow, slower, spread = confirmed[e.batch, e.context]
        ratios = [f"{ms / e.decode_ms:.2f}" for ms in e.fitted_ms]
        budget = f"**{e.budget}**" if e.is_knee else f"{e.budget} or more"
        again = ["-" if r != r else f"{r:.2f}" for r in (slow, slower)]
        rows.append([str(e.batch), str(e.context), f"{e.decode_ms:.2f}", *ratios, budget, *again,
                     f"{100 * (spread - 1):.0f} %"])  # fmt: skip
    return (
        f"{where.device}, torch {where.torch_version}, Triton {where.triton_version}; "
        f"{target['class']} of transformers {target['transformers']}, {target['model']}; "
        f"epsilon {profile.entries[0].epsilon:g}. Columns of numbers: time over one-token decode "
        "by nodes a request.\n\n" + table(head, rows)
    )


def _plan_times() -> str:
    """Microseconds of the planner in a graph."""
    said = []
    for rows, nodes in ((1, 64), (16, 64), (64, 256)):
        scores = -torch.rand(rows, nodes, device="cuda").cumsum(1)
        parents = torch.tensor([heap_tree(nodes)] * rows, device="cuda")
        total = torch.tensor(rows * nodes // 4, device="cuda")
        timing = replay_times(
            lambda _, s=scores, p=parents, t=total: plan_nodes(s, p, t)  # type: ignore[misc]
        )
        said.append(f"{timing.median_us:.0f} us for {rows} x {nodes}")
    return f"The planner in a CUDA graph: {', '.join(said)} nodes.\n"


if __name__ == "__main__":
    sys.exit(main())

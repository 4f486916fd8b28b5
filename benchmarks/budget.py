"""Accepted tokens a verified node, by what chooses the nodes: ``python benchmarks/budget.py``.

Replays recordings of the small hybrid model (examples/tree_decoding), no GPU needed, in batches
and at several budgets: the planner's batch-wide choice beside SGLang's fixed width a request and
AdaServe's selection. Writes docs/budget.jsonl, and from it the table of docs/budget.md and
docs/plots/budget.svg; ``--render`` only does the latter, ``--no-plots`` needs no matplotlib.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

import torch  # noqa: E402

from benchmarks.budget_page import render  # noqa: E402
from bolegen.ir import TreeTemplate  # noqa: E402
from bolegen_runtime import (  # noqa: E402
    cumulate,
    expect_tokens,
    plan_fixed_width,
    plan_nodes,
    plan_per_request,
)
from examples.tree_decoding.record import Round, read_rounds  # noqa: E402

__all__ = ["POLICIES", "Recording", "Request", "Result", "main", "simulate"]

EVERY = ROOT / "examples/recordings/small-hybrid-3x2x2x1x1x1-every.jsonl"
BATCHES = (4, 16)
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24)
SEEDS = 5


@dataclass(frozen=True)
class Situation:
    """What a policy may look at: a batch of trees, how many nodes it has, who is how far."""

    scores: torch.Tensor  # [B, T] cumulative
    parents: tuple[int, ...]
    width: int  # nodes a request, on average
    rounds: torch.Tensor  # [B] before this one
    tokens: torch.Tensor  # [B] they gave

    @property
    def total(self) -> int:
        """Nodes of the batch."""
        return self.width * len(self.scores)


def plan_by_batch(s: Situation) -> torch.Tensor:
    """The likeliest nodes of the batch."""
    return plan_nodes(s.scores, s.parents, s.total)


def plan_by_width(s: Situation) -> torch.Tensor:
    """As many nodes for each request."""
    return plan_fixed_width(s.scores, s.parents, s.width)


def plan_by_pace(pace: float) -> Callable[[Situation], torch.Tensor]:
    """First what keeps every request at ``pace`` tokens a round, counting what it is behind."""

    def plan(s: Situation) -> torch.Tensor:
        required = pace * (s.rounds + 1) - s.tokens
        most = 1.0 + TreeTemplate.from_parents(s.parents).depth
        return plan_per_request(
            s.scores, s.parents, s.total, required.clamp(max=most),
            limit=2 * s.width,
        )  # fmt: skip

    return plan


POLICIES: dict[str, Callable[[Situation], torch.Tensor]] = {
    "batch-wide": plan_by_batch,
    "fixed width": plan_by_width,
    "AdaServe, pace 1.5": plan_by_pace(1.5),
    "AdaServe, pace 2": plan_by_pace(2.0),
    "AdaServe, pace 3": plan_by_pace(3.0),
}


@dataclass(frozen=True)
class Recording:
    """A tree and the accepted path after every token of each prompt's continuation."""

    name: str
    parents: tuple[int, ...]
    prompts: tuple[tuple[Round, ...], ...]

    @classmethod
    def read(cls, file: Path) -> "Recording":
        """Raises ValueError for a recording that does not have every position."""
        run, rounds = read_rounds(file)
        if run.get("positions") != "every":
            raise ValueError(
                f"{file}: its rounds stand where paths ended, and another choice of nodes ends "
                "elsewhere; python -m examples.tree_decoding.positions records every position"
            )
        by_prompt: dict[int, list[Round]] = {}
        for item in rounds:
            by_prompt.setdefault(item.prompt, []).append(item)
        prompts = tuple(tuple(rounds) for rounds in by_prompt.values())
        return cls(f"{run['model']} {run['template']}", tuple(run["parents"]), prompts)


@dataclass
class Request:
    """A prompt that is being continued."""

    trees: Sequence[Round]
    at: int = 0
    rounds: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the last round reached the end of the recording, or went beyond it."""
        return self.at >= len(self.trees)


@dataclass
class Result:
    """What a simulation adds up."""

    steps: int = 0
    nodes: int = 0
    tokens: int = 0
    expected: float = 0.0
    paces: list[float] = field(default_factory=list)  # tokens a round, by request

    def record(self) -> dict[str, float]:
        """Figures of a JSON line; the slowest tenth is the 10th percentile over requests."""
        tenth = sorted(self.paces)[max(0, math.ceil(len(self.paces) / 10) - 1)]
        return {
            "per_node": self.tokens / self.nodes,
            "mean_pace": statistics.fmean(self.paces),
            "slowest_tenth": tenth,
            "steps": self.steps,
            "expected_over_accepted": self.expected / self.tokens,
        }


def simulate(
    recording: Recording,
    policy: Callable[[Situation], torch.Tensor],
    *,
    batch: int,
    width: int,
    seed: int,
) -> Result:
    """Decode all prompts, ``batch`` at a time, in an order drawn from ``seed``."""
    waiting = [Request(trees) for trees in recording.prompts]
    random.Random(seed).shuffle(waiting)
    active: list[Request] = []
    result = Result()
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(waiting.pop())
        _step(recording, policy, active, width, result)
        result.paces += [r.at / r.rounds for r in active if r.is_done]
        active = [r for r in active if not r.is_done]
    return result


def _step(
    recording: Recording,
    policy: Callable[[Situation], torch.Tensor],
    active: Sequence[Request],
    width: int,
    result: Result,
) -> None:
    """One round of the batch."""
    trees = [r.trees[r.at] for r in active]
    chances = torch.tensor([t.probabilities for t in trees])
    scores = cumulate(chances.log(), recording.parents)
    situation = Situation(
        scores,
        recording.parents,
        width,
        rounds=torch.tensor([float(r.rounds) for r in active]),
        tokens=torch.tensor([float(r.at) for r in active]),
    )
    live = policy(situation)
    result.steps += 1
    result.nodes += int(live.sum())
    result.expected += float(expect_tokens(scores, recording.parents, live).sum())
    for request, tree, keep in zip(active, trees, live.tolist(), strict=True):
        accepted = next((i for i, n in enumerate(tree.path) if not keep[n]), len(tree.path))
        request.at += accepted
        request.rounds += 1
        result.tokens += accepted


def _lines(recording: Recording) -> Iterator[dict[str, Any]]:
    """One line a case: the mean over orders of requests, the least and the most."""
    for batch in BATCHES:
        for width in WIDTHS:
            for name, policy in POLICIES.items():
                runs = [
                    simulate(recording, policy, batch=batch, width=width, seed=seed).record()
                    for seed in range(SEEDS)
                ]
                line: dict[str, Any] = {"recording": recording.name, "batch": batch}
                line |= {"width": width, "policy": name, "orders": SEEDS}
                for key in runs[0]:
                    values = [run[key] for run in runs]
                    line[key] = [round(f(values), 4) for f in (statistics.fmean, min, max)]
                yield line


def main() -> int:
    """Simulate and render."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recording", type=Path, default=EVERY)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/budget.jsonl")
    parser.add_argument("--render", action="store_true", help="do not simulate")
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args()
    if not options.render:
        torch.set_num_threads(1)
        lines = [json.dumps(line) for line in _lines(Recording.read(options.recording))]
        options.out.write_text("\n".join(lines) + "\n", "utf-8")
    render(options.out, plots=not options.no_plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())

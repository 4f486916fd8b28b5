"""Rounds of tree decoding as JSON lines: what was drafted, and what was accepted.

The first line describes the run and gives the template's ``parents``; each further line is
one round. Tests of the budget planner replay such a file, so this module needs no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "Round", "read_rounds", "write_rounds"]

FORMAT = "tree-rounds 1"


@dataclass(frozen=True)
class Round:
    """One round of one request.

    tokens and probabilities, by node: node 0 holds the token decided before the round; a
    probability is the drafter's own, given the parent, and 0 marks a node without a draft.
    path: the accepted nodes from the root down. next: the target's token after the path.
    """

    prompt: int
    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    path: tuple[int, ...]
    next: int

    @property
    def accepted(self) -> int:
        """Tokens that the round yields: the accepted drafts and the target's own next one."""
        return len(self.path)


def write_rounds(file: Path, run: Mapping[str, Any], rounds: Sequence[Round]) -> None:
    """Write a recording; ``run`` must give "parents". Probabilities keep four digits."""
    lines = [json.dumps({"format": FORMAT, **run})]
    for item in rounds:
        fields = asdict(item)
        fields["probabilities"] = [float(f"{p:.4g}") for p in item.probabilities]
        lines.append(json.dumps(fields, separators=(",", ":")))
    file.write_text("\n".join(lines) + "\n")


def read_rounds(file: Path) -> tuple[dict[str, Any], list[Round]]:
    """The run and the rounds of a recording. Raises ValueError for any other file."""
    try:
        first, *lines = file.read_text("utf-8").splitlines() or [""]
        run: dict[str, Any] = json.loads(first)
        if run["format"] == FORMAT:
            return run, [_round(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, or no recording: {error}") from error
    raise ValueError(f"{file} is no recording in the format {FORMAT!r}; --record writes one")


def _round(fields: Mapping[str, Any]) -> Round:
    rows = {key: tuple(fields[key]) for key in ("tokens", "probabilities", "path")}
    return Round(prompt=fields["prompt"], next=fields["next"], **rows)

"""Other systems' rules for the nodes to verify, to compare with and to fall back on."""

from __future__ import annotations

import torch

from bolegen_runtime.arguments import expect_tensor, expect_whole
from bolegen_runtime.budget.planner import (
    FLOATS,
    Count,
    Parents,
    check_trees,
    close_scores,
    one_total,
    per_row,
    plan_nodes,
)

__all__ = ["plan_fixed_width", "plan_per_request"]


def plan_fixed_width(
    scores: torch.Tensor,
    parents: Parents,
    width: Count,
    *,
    slots: torch.Tensor | None = None,
    remaining: Count | None = None,
) -> torch.Tensor:
    """The likeliest ``width`` nodes of every request, root included: live [B, T] bool.

    SGLang's rule, which keeps num_draft_tokens - 1 drafts a request by cumulative score, as
    EAGLE-2 reranks (arXiv 2406.16858). Arguments and errors as of plan_nodes.
    """
    check_trees(scores, parents, slots)
    if width is None:
        raise ValueError("width: expected an int or integers, got None")
    widths, every = per_row(width, 0, "width", scores)[:, 0], scores.numel()
    return plan_nodes(scores, parents, every, slots=slots, maximum=widths, remaining=remaining)


def plan_per_request(
    scores: torch.Tensor,
    parents: Parents,
    total: Count,
    required: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    limit: int | None = None,
    remaining: Count | None = None,
) -> torch.Tensor:
    """First what each request requires, then the likeliest of the batch: live [B, T] bool.

    AdaServe's rule (arXiv 2501.12162) in its two phases. Requests in order of ``required`` [B]
    floating, the tokens that a request must gain in this round to keep its pace, take their own
    likeliest nodes until their probabilities add up to that, or to ``limit`` nodes (None: no
    limit), while the total lasts. The rest of the total goes to the likeliest nodes of all.
    Equal requirements are served in order of rows. Other arguments and errors as of plan_nodes.
    """
    closed = close_scores(scores, parents)
    rows, nodes = scores.shape
    expect_tensor("required", required, (rows,), FLOATS, scores.device)
    limit = nodes if limit is None else expect_whole("limit", limit, None)
    total = one_total(total, scores)
    every = plan_nodes(scores, parents, scores.numel(), slots=slots, remaining=remaining)
    chances = (closed.exp() * every).sort(1, descending=True)[0]
    # nodes whose predecessors do not suffice yet; a difference of sums would be rounded
    before = torch.nn.functional.pad(chances.cumsum(1)[:, :-1], (1, 0))
    needed = (before < required[:, None]) & (chances > 0)
    wanted = needed.sum(1).clamp(max=min(limit, nodes))
    wanted = torch.maximum(wanted, every[:, 0].long())  # the root comes whatever is required
    order = required.masked_fill(~every[:, 0], float("-inf")).argsort(descending=True, stable=True)
    drafts = (wanted - every[:, 0].long())[order]
    left = total - every[:, 0].sum() - (drafts.cumsum(0) - drafts)
    granted = torch.minimum(drafts, left.clamp(min=0))
    minimum = torch.empty_like(granted).scatter_(0, order, granted) + 1
    return plan_nodes(scores, parents, total, slots=slots, minimum=minimum, remaining=remaining)

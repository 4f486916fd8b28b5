"""Which drafted nodes a round verifies: the likeliest of the whole batch, chosen on the device.

Scores are cumulative log-probabilities, so a child is never likelier than its parent, and the
likeliest nodes of a tree are always closed under parents: nothing has to be repaired afterwards.
Every operation has a fixed shape and none waits for the device, so a CUDA graph may hold it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from numbers import Integral

import torch

from bolegen_runtime.arguments import INTEGERS, expect_tensor, expect_whole

__all__ = [
    "FLOATS",
    "check_trees",
    "close_scores",
    "cumulate",
    "expect_tokens",
    "one_total",
    "per_row",
    "plan_nodes",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NEVER = float("-inf")
_LOG_MOST = 88.0  # of the largest float32
_MOST = 1 << 40  # more nodes than there are

Parents = torch.Tensor | Sequence[int]
Count = torch.Tensor | int


def plan_nodes(
    scores: torch.Tensor,
    parents: Parents,
    total: Count,
    *,
    slots: torch.Tensor | None = None,
    minimum: Count | None = None,
    maximum: Count | None = None,
    weight: torch.Tensor | None = None,
    remaining: Count | None = None,
) -> torch.Tensor:
    """Spend ``total`` nodes on a batch: live [B, T] bool, closed under parents, for verify.

    scores [B, T] floating: cumulative log-probability of each node (`cumulate` makes it of
    conditional ones). A node counts no more than its ancestors; node 0 counts as certain. NaN and
    -inf: no draft there, never live, nor what hangs below it. +inf: as likely as its parent.
    parents: a tuple [T] (copied to the device at its first use: not under capture), or a tensor
    [T] or [B, T] int. A node whose parent is not before it is dead.
    total: int or a tensor of one integer, roots included. The root of every row that is not padded
    is live whatever the total is: it is the token already decided. More than there are: all.
    slots [B] int: negative is a padded row, which is dead and costs nothing; None: no such row.
    minimum, maximum: nodes of a request, root included, int or [B]; where they contradict one
    another the maximum wins, and a maximum below 1 leaves the root. Where the minima together
    exceed the total, the likeliest nodes of those within them are taken.
    weight [B] floating: what a request's tokens are worth; not above 0: only its minimum.
    remaining: tokens that may still follow the root, int or [B]: no deeper node is live.

    Of all closed sets that keep to this, the result has the largest sum of weight times
    probability. Equals are taken by node number, then by row. Raises ValueError for a shape, dtype
    or device.
    """
    check_trees(scores, parents, slots, weight)
    rows, nodes = scores.shape
    count = one_total(total, scores)
    most = per_row(maximum, nodes, "maximum", scores)
    least = per_row(minimum, 0, "minimum", scores)
    depth_limit = per_row(remaining, nodes, "remaining", scores)
    if not rows:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)

    lowest, depth = _close(scores, parents)
    here = lowest.new_ones(rows, 1, dtype=torch.bool) if slots is None else (slots >= 0)[:, None]
    root = here & (torch.arange(nodes, device=scores.device) == 0)
    eligible = here & (lowest > _NEVER) & (depth <= depth_limit) | root
    rank = _positions(lowest.masked_fill(~eligible, _NEVER))
    allowed = eligible & (rank < most.clamp(min=1))

    worth = lowest if weight is None else lowest + _log_weight(weight)[:, None]
    # root, within the minimum, the rest, never
    tier = (allowed & (worth > _NEVER)).int()
    tier = tier.masked_fill(allowed & (rank < least), 2).masked_fill(root, 3)
    key = (tier.long() << 33) + _ordered(worth)
    # node by node, so that of equal nodes the lower one comes first, then the lower row
    position = _positions(key.t().reshape(1, -1)).view(nodes, rows).t()
    return (tier > 0) & (position < count) | root


def cumulate(log_probs: torch.Tensor, parents: Parents) -> torch.Tensor:
    """Cumulative log-probabilities [B, T] float32 of conditional ones, log_probs [B, T] floating.

    Node 0 has 0. NaN counts as -inf, what is above 0 as 0; a node without a valid parent has -inf.
    Raises ValueError as plan_nodes.
    """
    check_trees(log_probs, parents, name="log_probs")
    hops, has_parent = _hops(log_probs, parents)
    sums = _clean(log_probs, has_parent).clamp(max=0)
    for hop in hops:
        sums = sums + sums.gather(1, hop)
    return sums


def close_scores(scores: torch.Tensor, parents: Parents) -> torch.Tensor:
    """The scores [B, T] float32 that plan_nodes goes by: the least of a node and its ancestors."""
    check_trees(scores, parents)
    return _close(scores, parents)[0]


def expect_tokens(scores: torch.Tensor, parents: Parents, live: torch.Tensor) -> torch.Tensor:
    """Tokens that a round is expected to give each request, [B] float32: the sum over live nodes.

    A draft is accepted with its cumulative probability, as far as the drafter is calibrated; the
    root, which has probability 1, stands for the token that the target itself adds. live [B, T]:
    what plan_nodes gave. Raises ValueError as plan_nodes.
    """
    lowest = close_scores(scores, parents)
    expect_tensor("live", live, tuple(scores.shape), (torch.bool,), scores.device)
    return (lowest.exp() * live).sum(1)


def _close(scores: torch.Tensor, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """Least score on the path to a node, and its depth in edges; both [B, T]."""
    hops, has_parent = _hops(scores, parents)
    lowest, depth = _clean(scores, has_parent), has_parent.int()
    for hop in hops:
        lowest = torch.minimum(lowest, lowest.gather(1, hop))
        depth = depth + depth.gather(1, hop)
    return lowest, depth


def _hops(scores: torch.Tensor, parents: Parents) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Ancestors 1, 2, 4, ... edges up, the root where there are fewer, and who has a parent.

    Parents come before children, so whatever the links say there is no circle to be caught in.
    """
    rows, nodes = scores.shape
    given = parents if isinstance(parents, torch.Tensor) else _keep(tuple(parents), scores.device)
    given = given.expand(rows, nodes)
    has_parent = (given >= 0) & (given < torch.arange(nodes, device=scores.device))
    hops = [torch.where(has_parent, given, 0).long()]
    while 1 << len(hops) < nodes:
        hops.append(hops[-1].gather(1, hops[-1]))
    return hops, has_parent


@cache
def _keep(parents: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A static tree on the device, copied there once and kept: graphs know its address."""
    # what is no node is none, however large
    known = [parent if -1 <= parent < len(parents) else -1 for parent in parents]
    return torch.tensor(known, dtype=torch.int32, device=device)


def _clean(scores: torch.Tensor, has_parent: torch.Tensor) -> torch.Tensor:
    """Scores in float32 without NaN; orphans never, roots certain."""
    known = has_parent & ~scores.isnan()
    clean = scores.float().masked_fill(~known, _NEVER)
    first = torch.arange(scores.shape[1], device=scores.device) == 0
    return clean.masked_fill(first, 0.0)


def _log_weight(weight: torch.Tensor) -> torch.Tensor:
    """-inf where it is worth nothing; never inf, which would make all its nodes equal."""
    return torch.where(weight > 0, weight, 0).float().log().clamp(max=_LOG_MOST)


def _positions(keys: torch.Tensor) -> torch.Tensor:
    """Where each key comes in its row when sorted, the greatest first and equals as they stand."""
    order = keys.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(keys.shape[1], device=keys.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers within 32 bits in the order of float32 x: its bits, negative ones reversed."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def one_total(total: Count, scores: torch.Tensor) -> Count:
    """An int, or a tensor that broadcasts."""
    if not isinstance(total, torch.Tensor):
        return _clamped(total, "total")
    expect_tensor("total", total, (1,) * total.dim(), INTEGERS, scores.device)
    return total.reshape(())


def per_row(value: Count | None, default: int, name: str, scores: torch.Tensor) -> torch.Tensor:
    """[B, 1] integers."""
    rows, device = scores.shape[0], scores.device
    if not isinstance(value, torch.Tensor):
        number = default if value is None else _clamped(value, name)
        return torch.full((rows, 1), number, dtype=torch.int64, device=device)
    expect_tensor(name, value, (rows,), INTEGERS, device)
    return value[:, None]


def _clamped(value: int, name: str) -> int:
    return min(max(expect_whole(name, value, None), -_MOST), _MOST)


def check_trees(
    scores: torch.Tensor,
    parents: Parents,
    slots: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    *,
    name: str = "scores",
) -> None:
    """Shapes, dtypes and devices; contents are not looked at, which would wait for the device."""
    expect_tensor(name, scores, (None, None), FLOATS, None)
    rows, nodes = scores.shape
    if not nodes:
        raise ValueError(f"{name}: expected [B, T] with T >= 1, got {tuple(scores.shape)}")
    if isinstance(parents, torch.Tensor):
        shape = (nodes,) if parents.dim() == 1 else (rows, nodes)
        expect_tensor("parents", parents, shape, INTEGERS, scores.device)
    elif not isinstance(parents, Sequence) or not all(isinstance(p, Integral) for p in parents):
        raise ValueError(f"parents: expected a tensor or whole numbers, got {parents!r:.60}")
    elif len(parents) != nodes:
        raise ValueError(f"parents: expected {nodes} nodes as in {name}, got {len(parents)}")
    if slots is not None:
        expect_tensor("slots", slots, (rows,), INTEGERS, scores.device)
    if weight is not None:
        expect_tensor("weight", weight, (rows,), FLOATS, scores.device)

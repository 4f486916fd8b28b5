"""Whether a round of trees is worth its time, or plain decoding yields more."""

from __future__ import annotations

from dataclasses import dataclass

from bolegen_runtime.arguments import expect_kind, expect_number, expect_whole
from bolegen_runtime.budget.profile import ProfileEntry

__all__ = ["Comparison", "compare_with_decode"]


@dataclass(frozen=True)
class Comparison:
    """Tokens a millisecond of the batch, by trees and by plain decoding.

    ``speculate``: trees give more. ``reason``: the comparison in words, for a log or a metric.
    """

    speculate: bool
    tree_rate: float
    plain_rate: float
    reason: str


def compare_with_decode(
    entry: ProfileEntry, *, rows: int, nodes: int, expected: float, overhead_ms: float = 0.0
) -> Comparison:
    """Compare one round over ``nodes`` nodes of ``rows`` requests with one-token decode.

    ``expected``: tokens that the round gives the batch, the sum of `expect_tokens`: each live
    node's cumulative probability, 1 for a root, whose row always gains the target's own token.
    Plain decoding gives ``rows`` tokens in entry.decode_ms; the round takes what the profile says
    of ``nodes``, and ``overhead_ms`` for drafting and all else that plain decoding does not do.
    Equal rates are no reason to speculate. Raises ValueError for numbers that cannot be, and
    ProfileError for more nodes than were measured.
    """
    expect_kind("entry", entry, ProfileEntry)
    rows, nodes = expect_whole("rows", rows, 1), expect_whole("nodes", nodes, 1)
    expected = expect_number("expected", expected)
    overhead_ms = expect_number("overhead_ms", overhead_ms)
    if nodes < rows or not (rows <= expected and expected / (1 + 1e-6) <= nodes):
        raise ValueError(
            "rows, nodes, expected: expected 1 <= rows <= expected <= nodes, "
            f"got {rows}, {nodes} and {expected}"
        )
    if rows > entry.batch:
        raise ValueError(f"rows: expected at most the entry's batch {entry.batch}, got {rows}")
    tree = expected / (entry.cost_ms(nodes) + overhead_ms)
    plain = rows / entry.decode_ms
    reason = f"{expected:.2f} tokens by trees at {tree:.3f} a ms, {rows} plainly at {plain:.3f}"
    return Comparison(tree > plain, tree, plain, reason)

"""From the server's flags to the trees that it will verify, or to a refusal that names a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bolegen_runtime.sglang.errors import PluginError
from bolegen_runtime.sglang.tiers import MOST_NODES, Tier

__all__ = ["TreeBounds", "read_bounds"]

DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "NGRAM")
# the one value of each flag that is served; None, where a release has no such flag, is as good
SERVED: dict[str, Any] = {
    "device": "cuda",
    "disaggregation_mode": "null",
    "pp_size": 1,
    "enable_dp_attention": False,
    "enable_unified_memory": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_memory_saver": False,
    "enable_multi_layer_eagle": False,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_gdn_replayssm_spec": False,
}


@dataclass(frozen=True)
class TreeBounds:
    """What every tree of a server keeps to: nodes with the root, depth in edges; ``chain``: all
    of them are that many nodes in a row, and the engine tells no links.
    """

    nodes: int
    depth: int
    chain: bool = False


def read_bounds(
    flags: Mapping[str, Any],
    tiers: tuple[Tier, ...] = (),
    *,
    ngram: bool = True,
    chains: bool = False,
) -> tuple[TreeBounds, ...] | None:
    """The bounds that the resolved flags and tiers set, the widest first; None where the server
    verifies none of what is asked for: trees, and ``chains`` if so. ``ngram``: of the release.
    Raises PluginError for a flag under which they are not served.
    """
    algorithm = flags.get("speculative_algorithm")
    topk = flags.get("speculative_eagle_topk") or 0
    if algorithm is None or topk <= (0 if chains else 1):
        if tiers:
            raise PluginError(
                "BOLEGEN_TIERS: expected a server that verifies trees; start with "
                "--speculative-algorithm and --speculative-eagle-topk above 1, or unset it"
            )
        return None
    drafters = DRAFTERS if ngram else DRAFTERS[:-1]
    unless = f"unset BOLEGEN_{'CHAINS' if topk == 1 else 'ENABLE'}"
    if str(algorithm).upper() not in drafters:
        raise PluginError(
            f"--speculative-algorithm: expected one of {', '.join(drafters)}, got {algorithm}; "
            f"take one of them, or {unless}"
        )
    for name, served in SERVED.items():
        if flags.get(name) not in (None, served):
            flag = f"--{name.replace('_', '-')}"
            raise PluginError(
                f"{flag} is {flags[name]!r}, which the bolegen plugin does not serve: "
                f"leave out {flag}, or {unless}"
            )
    nodes = int(flags["speculative_num_draft_tokens"])
    if not 2 <= nodes <= MOST_NODES:
        raise PluginError(
            f"--speculative-num-draft-tokens: expected 2 to {MOST_NODES}, got {nodes}"
        )
    if str(algorithm).upper() == "NGRAM":
        if topk == 1:
            # its matches may branch at the root even so, and SGLang tells no links then
            raise PluginError(
                "--speculative-ngram-max-bfs-breadth: expected above 1, where SGLang tells which "
                f"nodes hang together; raise it, or {unless}"
            )
        if tiers:
            raise PluginError("--speculative-algorithm NGRAM: leave out BOLEGEN_TIERS")
        return (TreeBounds(nodes, nodes - 1),)
    if topk == 1:
        if tiers or flags.get("speculative_adaptive"):
            raise PluginError(
                "BOLEGEN_CHAINS: expected chains of one length; leave out --speculative-adaptive "
                f"and BOLEGEN_TIERS, or {unless}"
            )
        return (TreeBounds(nodes, nodes - 1, chain=True),)
    if tiers:
        return _read_tiers(flags, tiers, topk)
    return (TreeBounds(nodes, min(int(flags["speculative_num_steps"]), nodes - 1)),)


def _read_tiers(
    flags: Mapping[str, Any], tiers: tuple[Tier, ...], topk: int
) -> tuple[TreeBounds, ...]:
    """One bound for each width, as deep as its deepest tier."""
    if not flags.get("speculative_adaptive"):
        raise PluginError("BOLEGEN_TIERS: start with --speculative-adaptive, or unset it")
    for tier in tiers:
        # what SGLang drafts in so many steps, and the root
        most = 1 + topk + (tier.steps - 1) * topk**2
        if tier.steps and tier.nodes > most:
            raise PluginError(
                f"BOLEGEN_TIERS: {tier.steps}x{tier.nodes}: expected at most {most} nodes with "
                f"--speculative-eagle-topk {topk}"
            )
    # SGLang makes room for a round's drafts by the widest tier and by the steps that it leaves,
    # before it takes another
    page, deepest = int(flags.get("page_size") or 1), max(t.steps for t in tiers)
    drafts, least = (_count_drafts(n, topk, page) for n in (deepest, min(t.steps for t in tiers)))
    room = max(max(t.nodes for t in tiers), least)
    if drafts > room:
        paged = f" and --page-size {page}" if page > 1 else ""
        raise PluginError(
            f"BOLEGEN_TIERS: {deepest} steps with --speculative-eagle-topk {topk}{paged} draft "
            f"into {drafts} tokens' room, and SGLang makes {room} before it switches; give the "
            f"widest as many nodes, or take fewer steps{' or pages of 1' if page > 1 else ''}"
        )
    widths = {tier.nodes: tier.steps for tier in sorted(tiers, key=lambda t: (t.nodes, t.steps))}
    return tuple(TreeBounds(n, min(widths[n], n - 1)) for n in sorted(widths, reverse=True))


def _count_drafts(steps: int, topk: int, page: int) -> int:
    """Tokens of the KV cache that SGLang takes for a request's drafts: each of the topk has pages
    of its own, a part of the first already in use.
    """
    steps = max(steps, 1)
    return topk * (steps if page == 1 else (2 * (page - 1) + steps) // page * page)

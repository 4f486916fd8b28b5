"""Trees by batch size in one server: "1:8x64 8:4x16 32:0" is 64 nodes of 8 draft steps from one
request on, 16 of 4 steps from eight, and plain decoding from 32.

SGLang switches draft steps by batch size for chains (--speculative-adaptive), zero steps being
plain decoding. Hooks into that let it do the same for trees: steps are SGLang's, nodes ours.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bolegen_runtime.sglang.errors import PluginError
from bolegen_runtime.sglang.versions import Release

__all__ = ["MOST_NODES", "Tier", "Tiers", "parse_tiers", "read_tiers"]

Method = Callable[..., Any]
TIER = re.compile(r"(\d+):(?:(\d+)x(\d+)|0)")
TIERS = "BOLEGEN_TIERS"
MOST_NODES = 256


@dataclass(frozen=True)
class Tier:
    """From ``batch`` requests on: draft steps, and nodes of a request with its root."""

    batch: int
    steps: int
    nodes: int


def parse_tiers(text: str) -> tuple[Tier, ...]:
    """Tiers from words of BATCH:STEPSxNODES or BATCH:0; raises PluginError."""
    tiers = tuple(map(_parse_tier, text.split()))
    batches, steps = [tier.batch for tier in tiers], [tier.steps for tier in tiers]
    if tiers and (batches[0] != 1 or sorted(set(batches)) != batches):
        raise PluginError(f"{TIERS}: expected batch sizes that rise from 1, got {batches}")
    if len(set(steps)) < len(steps):
        raise PluginError(f"{TIERS}: expected each number of steps once, got {steps}")
    return tiers


def _parse_tier(word: str) -> Tier:
    match = TIER.fullmatch(word)
    if match is None:
        raise PluginError(f"{TIERS}: expected BATCH:STEPSxNODES or BATCH:0, got {word!r}")
    batch, steps, nodes = (int(part or 0) for part in match.groups())
    if match.group(3) is None:
        return Tier(batch, 0, 1)
    if not 1 <= steps < nodes <= MOST_NODES:
        raise PluginError(
            f"{TIERS}: {word}: expected 2 to {MOST_NODES} nodes, and steps from 1 to fewer"
        )
    return Tier(batch, steps, nodes)


def read_tiers(text: str, release: Release) -> Tiers | None:
    """The hooks of what was said, None where nothing was; raises PluginError."""
    tiers = parse_tiers(text)
    if tiers and not release.tiers:
        raise PluginError(f"{TIERS}: not served with SGLang {release.version}; unset it")
    return Tiers(tiers) if tiers else None


class Tiers:
    """The hooks of one server's tiers; each gets the method that it stands for."""

    def __init__(self, tiers: tuple[Tier, ...]) -> None:
        self.tiers = tiers
        self._nodes = {tier.steps: tier.nodes for tier in tiers}

    @cached_property
    def targets(self) -> tuple[tuple[str, Method, str, tuple[str, ...]], ...]:
        """Target, hook, kind, and the names that the target must take."""
        speculative = "sglang.srt.speculative"
        return (
            (
                f"{speculative}.adaptive_spec_params.adaptive_unsupported_reason",
                self.allow,
                "AROUND",
                ("server_args",),
            ),
            (
                f"{speculative}.adaptive_spec_params._load_adaptive_config",
                self.list_steps,
                "AROUND",
                ("cfg_path",),
            ),
            (
                "sglang.srt.arg_groups.speculative_hook._init_adaptive_speculative_params",
                self.start,
                "AROUND",
                ("server_args",),
            ),
            (
                f"{speculative}.spec_info.SpeculativeAlgorithm"
                ".resolve_max_speculative_num_draft_tokens",
                self.widest,
                "AROUND",
                ("server_args",),
            ),
            (
                f"{speculative}.eagle_worker_v2.EAGLEWorkerV2.build_adaptive_runtime_state",
                self.build,
                "AROUND",
                ("speculative_num_steps", "speculative_num_draft_tokens", "cuda_graph_bs"),
            ),
        )

    def allow(self, original: Method, server_args: Any) -> str | None:
        """Adaptive steps with topk above 1, which SGLang has for chains alone."""
        reason: str | None = original(server_args)
        return None if reason and reason.startswith("speculative_eagle_topk=") else reason

    def list_steps(self, original: Method, cfg_path: str | None) -> Any:
        """One number of steps for each batch size, in place of a file's or SGLang's own."""
        if cfg_path is not None:
            raise PluginError(f"--speculative-adaptive-config: leave it out beside {TIERS}")
        slots = {tier.batch: {"candidate_steps": [tier.steps]} for tier in self.tiers}
        return {}, slots

    def start(self, original: Method, server_args: Any) -> None:
        """The nodes of the steps that the server starts with."""
        original(server_args)
        overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
        steps = overrides.resolving_view(server_args).speculative_num_steps
        overrides.declare_resolution(
            server_args, "bolegen", speculative_num_draft_tokens=self._nodes[steps]
        )

    def widest(self, original: Method, algorithm: Any, server_args: Any) -> int | None:
        """The most nodes that a request may have."""
        return None if original(algorithm, server_args) is None else max(self._nodes.values())

    def build(
        self,
        original: Method,
        worker: Any,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> Any:
        """A tier's graphs at its own width."""
        return original(
            worker,
            speculative_num_steps=speculative_num_steps,
            speculative_num_draft_tokens=self._nodes[speculative_num_steps],
            cuda_graph_bs=cuda_graph_bs,
        )

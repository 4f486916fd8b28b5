"""Accepted lengths that SGLang simulates: one, or one for each number of draft steps.

SGLang's own setting is one length for all rounds; trees by batch size need one for each tier.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

__all__ = ["KEY", "Lengths", "add_option", "environment", "parse_lengths", "simulate"]

KEY = "BOLEGEN_SIMULATED"
OWN = "SGLANG_SIMULATE_ACC_LEN"
Lengths = float | dict[str, float]


def add_option(parser: argparse.ArgumentParser) -> None:
    """--accept of a command that starts an engine."""
    said = "accepted length that SGLang simulates, or STEPS:LENGTH ... for --tiers"
    parser.add_argument("--accept", type=parse_lengths, help=said)


def parse_lengths(said: str) -> Lengths:
    """``5.6``, or ``6:5.6 4:4.3`` by steps. Raises ValueError."""
    if ":" not in said:
        return float(said)
    pairs = (word.split(":") for word in said.split())
    return {str(int(steps)): float(length) for steps, length in pairs}


def environment(lengths: Lengths | None) -> dict[str, str]:
    """What an engine and the probe in it read before they start."""
    if isinstance(lengths, dict):
        by_steps = " ".join(f"{steps}:{length}" for steps, length in lengths.items())
        # any length lets SGLang simulate; the probe says which
        return {OWN: "1.0", KEY: by_steps}
    return {KEY: "", **({OWN: str(lengths)} if lengths else {})}


def simulate(original: Callable[..., Any], **said: Any) -> Any:
    """SGLang's simulation of one round, at the length of its steps; plain decoding has none."""
    lengths = parse_lengths(os.environ[KEY])
    steps = said["spec_steps"]
    length = {"0": 1.0, **lengths}.get(str(steps)) if isinstance(lengths, dict) else None
    if length is None:
        raise ValueError(f"{KEY}: expected a length for {steps} steps, got {lengths}")
    return original(**{**said, "simulate_acc_len": length})

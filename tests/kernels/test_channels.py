"""Decays per key channel: slow and fast ones in one head, cuts, bounds; nothing overflows."""

from typing import Any

import numpy as np
import pytest
import torch

from bolegen.ir import DType
from support.judge import Worst
from support.rounds import Round, build, make_round, play

DEEP = [-1, *range(16), 3, 17, 9, 19]  # a chain of depth 16 with two branches
LAST = [16, 20]
KINDS: dict[str, dict[str, Any]] = {
    "replay": {},
    "pku": {"factors": "pku"},
    "fp32": {"dtype": DType.FP32},
    "ratio": {"value_heads": 2, "d_k": 24, "d_v": 40},
}


def with_log_decays(r: Round, low: float, high: float, seed: int = 5) -> Round:
    """Channels of one head decay by e^low to e^high a token: a = log(e^-g - 1), A_log = 0."""
    wanted = np.geomspace(-high, -low, r.a.shape[-1])
    wanted = np.random.default_rng(seed).permuted(
        np.broadcast_to(wanted, r.a.shape).copy(), axis=-1
    )
    r.a = torch.from_numpy(np.log(np.expm1(wanted))).float()
    r.A_log, r.dt_bias = torch.zeros_like(r.A_log), torch.zeros_like(r.dt_bias)
    return r


def judge(mixer: str, kind: str, change: Any) -> Worst:
    m = build("any:24", depth=16, mixer=mixer, **({"value_heads": 1} | KINDS[kind]))
    r = make_round(m, trees=[DEEP] * 2, repeat=0.9, write=2.0)
    return play(m, change(r), LAST)


@pytest.mark.parametrize("kind", KINDS)
def test_slow_and_fast_channels_of_one_head(kind: str) -> None:
    judge("kda", kind, lambda r: with_log_decays(r, -20.0, -0.01)).assert_within()


def test_no_decay_at_all_and_cuts_side_by_side() -> None:
    def change(r: Round) -> Round:
        r = with_log_decays(r, -1.0, -0.01)
        r.a[..., ::3] = -float("inf")  # a decay of 1
        r.a[:, :, 5, :, 1::3] = 1e30  # a decay of 0 at one node
        return r

    judge("kda", "replay", change).assert_within()


@pytest.mark.parametrize("kind", ["replay", "pku"])
def test_the_bounded_gate_at_its_bound(kind: str) -> None:
    def change(r: Round) -> Round:
        r.a = 40.0 * torch.sign(r.a).float()
        return r

    judge("kda_bounded", kind, change).assert_within()

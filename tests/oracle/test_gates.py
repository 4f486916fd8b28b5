"""Log decays and write gates of every mixer, by formulas written down a second time."""

import math
from typing import Any

import numpy as np
import pytest

from bolegen import oracle
from bolegen.ir import MIXERS, Decay, Mixer

every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())


def soft(step: float) -> float:
    return step if step > 20 else math.log1p(math.exp(step))


def gated(a: float, b: float, rate: float, bias: float) -> float:
    return -math.exp(rate) * soft(a + bias)


def sigmoid(a: float, b: float, rate: float, bias: float) -> float:
    return 1 / (1 + math.exp(-b)) if b > -700 else 0.0


FORMULAS: dict[str, tuple[Any, Any]] = {
    "gdn": (gated, sigmoid),
    "gdn_neg": (gated, lambda *given: 2 * sigmoid(*given)),
    "deltanet": (lambda *_: 0.0, sigmoid),
    "kda": (gated, sigmoid),
    "kda_bounded": (
        lambda a, b, rate, bias: -5 / (1 + math.exp(-math.exp(rate) * (a + bias))),
        sigmoid,
    ),
    "mamba2": (gated, lambda a, b, rate, bias: soft(a + bias)),
    "lightning": (lambda a, b, rate, bias: -math.exp(rate), lambda *_: 1.0),
}


def test_every_mixer_has_its_formulas_here() -> None:
    assert FORMULAS.keys() == MIXERS.keys()


@every_mixer
def test_gates_follow_their_formulas(mixer: Mixer) -> None:
    a, b = np.array([[-3.0, 0.5, 25.0, 4.0]]), np.array([[-30.0, 0.0, 3.0, 800.0]])
    rate, bias = np.array([0.5, -1.0, 0.0, 2.0]), np.array([0.1, 0.2, 0.3, -4.0])
    if mixer.decay is Decay.CHANNEL:
        a, bias = a[..., None], bias[..., None]  # of one channel
    given = {"a": a, "b": b, "A_log": rate, "dt_bias": bias}
    read = {name: x if name in mixer.arguments else None for name, x in given.items()}
    log_decay, beta = oracle.gates(*read.values(), mixer=mixer)
    # what is not read may be anything
    for known, other in zip(
        (log_decay, beta), oracle.gates(*given.values(), mixer=mixer), strict=True
    ):
        assert np.array_equal(known, other)
    for h in range(4):
        one = [float(np.squeeze(x).item(h)) for x in given.values()]
        for got, formula in zip((log_decay, beta), FORMULAS[mixer.name], strict=True):
            assert got[0, h].item() == pytest.approx(formula(*one), rel=1e-14)


@pytest.mark.parametrize(
    ("a", "rate", "want"),
    [
        (0.0, 1000.0, -math.inf),  # exp(A_log) overflows: a cut
        (30.0, 0.0, -30.0),  # linear above 20
        (-1000.0, 0.0, 0.0),  # a gate of exactly 1
        (-800.0, 790.0, -math.exp(-10.0)),  # either factor alone leaves float64
        (5.0, -math.inf, 0.0),
        (math.inf, 0.0, -math.inf),
    ],
)
def test_gates_at_the_edge_of_float64(a: float, rate: float, want: float) -> None:
    log_decay, beta = oracle.gates([[a]], [[-800.0]], [rate], [0.0])
    assert log_decay[0, 0] == pytest.approx(want, rel=1e-12)
    assert beta[0, 0] == 0.0

"""Log decays and write gates of each mixer, by their formulas."""

import numpy as np
from numpy.typing import ArrayLike

from bolegen.ir import GDN, Decay, Mixer
from bolegen.oracle.paths import Array, as_float

__all__ = ["gates"]

SOFTPLUS_LINEAR = 20.0  # softplus(x) is x above this


def gates(
    a: ArrayLike | None,
    b: ArrayLike | None,
    A_log: ArrayLike | None,
    dt_bias: ArrayLike | None,
    *,
    mixer: Mixer = GDN,
    nodes: int = 1,
) -> tuple[Array, Array]:
    """Log decay g <= 0 (natural logarithm) and write gate beta, both [T, Hv].

    ``a`` and ``b`` are [T, Hv], ``A_log`` and ``dt_bias`` [Hv], None where the mixer does not read
    them; ``nodes`` is T where it reads neither a nor b. With a decay per key channel ``a`` and g
    are [T, Hv, d_k], ``dt_bias`` [Hv, d_k]. Softplus is linear above 20. Where exp(A_log)
    overflows g is -inf, a decay of exactly 0: a cut. Source: docs/theory.md, SGLang's gating.
    """
    given = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    named = mixer.arguments
    known = {name: as_float(x) for name, x in given.items() if name in named and x is not None}
    rows = next((len(known[name]) for name in ("a", "b") if name in known), nodes)
    heads = next(known[name] for name in ("A_log", "b") if name in known).shape[-1]
    every = np.zeros((rows, heads))
    log_decay = _log_decay(known, mixer)
    each = every[..., None] if mixer.decay is Decay.CHANNEL else every
    return each + log_decay, every + _write_gate(known, mixer)


def _log_decay(known: dict[str, Array], mixer: Mixer) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        if mixer.decay is Decay.NONE:
            return np.zeros(())
        rate = known["A_log"]
        if mixer.decay is Decay.CONSTANT:
            return -np.exp(rate)
        step = known["a"] + known["dt_bias"]
        if mixer.decay is Decay.CHANNEL:
            rate = rate[:, None]
        if mixer.log_decay.startswith("-5 sigmoid"):
            return -5 / (1 + np.exp(-np.exp(rate) * step))
        # far below zero softplus(x) is e^x, which may vanish where exp(A_log) overflows
        return np.where(step < -40, -np.exp(rate + step), -np.exp(rate) * _softplus(step))


def _write_gate(known: dict[str, Array], mixer: Mixer) -> Array:
    if mixer.write_gate == "1":
        return np.ones(())
    if mixer.write_gate == "softplus(a + dt_bias)":
        return _softplus(known["a"] + known["dt_bias"])
    scale = {"sigmoid(b)": 1, "2 sigmoid(b)": 2}[mixer.write_gate]
    with np.errstate(over="ignore"):
        gate: Array = scale / (1 + np.exp(-known["b"]))
    return gate


def _softplus(step: Array) -> Array:
    softplus = np.log1p(np.exp(np.minimum(step, SOFTPLUS_LINEAR)))
    return np.where(step > SOFTPLUS_LINEAR, step, softplus)

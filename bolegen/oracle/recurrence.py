"""The recurrence by definition, and the state after an accepted path."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bolegen.ir import GDN, Mixer
from bolegen.oracle.gates import gates
from bolegen.oracle.paths import Array, Live, Parents, as_float, find_path, walk_nodes
from bolegen.oracle.rows import convolve, normalise, split_rows

__all__ = ["Verified", "committed_state", "recurrence", "verify"]


@dataclass(frozen=True)
class Verified:
    """One request, verified.

    ``o`` [T, Hv, d_v] outputs, ``u`` [T, Hv, d_v] local deltas, ``states``
    [T, Hv, d_v, d_k] the state after each node, None unless asked for.
    """

    o: Array
    u: Array
    states: Array | None = None


def recurrence(
    parents: Parents,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike,
    *,
    live: Live | None = None,
    keep_states: bool = False,
    mixer: Mixer = GDN,
    D: ArrayLike | None = None,
) -> Verified:
    """Every node from its parent's state, one after another.

    S_i = e^g_i S_p(i) + k_i u_i^T, u_i = beta_i (v_i - e^g_i S_p(i)^T k_i), o_i = S_i^T q_i
    (docs/theory.md; Bole, section II-A); without a delta term u_i = beta_i v_i; with a skip
    o_i gains D v_i, ``D`` [Hv]. ``q``, ``k`` [T, Hk, d_k] after the norm, ``v`` [T, Hv, d_v],
    ``log_decay`` [T, Hv], or [T, Hv, d_k] by key channel, ``beta`` [T, Hv], ``state``
    [Hv, d_v, d_k], the pool's layout, that is S transposed. Value head h uses key head
    h // (Hv / Hk). Raises TreeError for parents that are no tree or a live mask with holes.
    """
    q, k, v, decay, beta = _spread(q, k, v, log_decay, beta)
    o, u = np.zeros_like(v), np.zeros_like(v)
    states = np.zeros((len(v), *np.shape(state))) if keep_states else None
    order = walk_nodes(parents, live)
    # a state is dropped after its last child: 256 states of one layer are a gigabyte
    last_child = {int(parents[node]): node for node in order}
    alive: dict[int, Array] = {-1: as_float(state)}
    for node in order:
        parent = int(parents[node])
        decayed = alive[parent] * decay[node]
        known = _apply(decayed, k[node]) if mixer.delta else 0
        u[node] = beta[node, :, None] * (v[node] - known)
        decayed += u[node, :, :, None] * k[node, :, None, :]
        o[node] = _apply(decayed, q[node])
        if D is not None:
            o[node] += as_float(D)[:, None] * v[node]
        if states is not None:
            states[node] = decayed
        if node in last_child:
            alive[node] = decayed
        if last_child[parent] == node:
            del alive[parent]
    return Verified(o, u, states)


def verify(
    parents: Parents,
    x: ArrayLike,
    a: ArrayLike | None,
    b: ArrayLike | None,
    conv_weight: ArrayLike | None,
    A_log: ArrayLike | None,
    dt_bias: ArrayLike | None,
    state: ArrayLike,
    conv_state: ArrayLike | None,
    *,
    key_heads: int,
    conv_bias: ArrayLike | None = None,
    live: Live | None = None,
    round_rows: Callable[[Array], Array] | None = None,
    keep_states: bool = False,
    mixer: Mixer = GDN,
    D: ArrayLike | None = None,
) -> Verified:
    """One layer for one request: convolution, norm, gates, recurrence.

    The arguments of an emitted ``verify`` without the batch axis; heads and dims follow from
    ``state`` [Hv, d_v, d_k]. ``round_rows`` rounds the convolved rows [T, C] to the
    activations' dtype, the one rounding that the contract allows (docs/theory.md).
    """
    value_heads, _, d_k = np.shape(state)
    rows = as_float(x)
    if conv_weight is not None and conv_state is not None:
        rows = convolve(parents, rows, conv_state, conv_weight, conv_bias, live=live)
    if round_rows is not None:
        rows = as_float(round_rows(rows))
    shape = {"key_heads": key_heads, "value_heads": value_heads, "d_k": d_k}
    q, k, v = split_rows(rows, **shape, mixer=mixer)
    q, k = normalise(q, k, mixer)
    known = gates(a, b, A_log, dt_bias, mixer=mixer, nodes=len(rows))
    options: dict[str, Any] = {"live": live, "keep_states": keep_states, "mixer": mixer, "D": D}
    return recurrence(parents, q, k, v, *known, state, **options)


def committed_state(
    parents: Parents,
    last_node: int,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike,
    *,
    live: Live | None = None,
    mixer: Mixer = GDN,
) -> Array:
    """The state [Hv, d_v, d_k] after the path to ``last_node``, the last accepted node.

    Arguments as in `recurrence`. -1, a dead node or one that is not there commits nothing.
    Only the path is read.
    """
    _, k, v, decay, beta = _spread(k, k, v, log_decay, beta)
    current = as_float(state).copy()
    for node in find_path(parents, last_node, live=live):
        current *= decay[node]
        known = _apply(current, k[node]) if mixer.delta else 0
        u = beta[node, :, None] * (v[node] - known)
        current += u[:, :, None] * k[node, :, None, :]
    return current


def _spread(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, log_decay: ArrayLike, beta: ArrayLike
) -> tuple[Array, Array, Array, Array, Array]:
    """Float64 operands with keys repeated for every value head, and the decay of a state."""
    v = as_float(v)
    ratio = v.shape[1] // np.shape(k)[1]
    q, k = (np.repeat(as_float(x), ratio, axis=1) for x in (q, k))
    decay = np.exp(as_float(log_decay))
    decay = decay[:, :, None] if decay.ndim == 3 else decay[:, :, None, None]
    return q, k, v, decay, as_float(beta)


def _apply(state: Array, row: Array) -> Array:
    """S^T x for every head: [Hv, d_v, d_k], [Hv, d_k] -> [Hv, d_v]."""
    product: Array = (state @ row[:, :, None])[:, :, 0]
    return product

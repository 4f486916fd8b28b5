"""What every kernel must compute: the recurrence by definition, in float64, node by node.

This file is the only definition of meaning (docs/theory.md). It is written from the
equations alone: no closed form, no mask, no plan. All functions take one request and return
float64; inputs of any real dtype are widened first. Letters: T nodes, Hk and Hv key and value
heads, d_k and d_v dims, C = 2 Hk d_k + Hv d_v channels, W convolution width.

``parents`` [T] holds each node's parent, -1 for node 0. ``live`` [T] bool, None = all, is
prefix-closed: a dead node is never read, whatever it holds, and its results are zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bolegen.errors import TreeError

__all__ = [
    "Array",
    "Verified",
    "committed_state",
    "committed_window",
    "convolve",
    "find_path",
    "gates",
    "normalise",
    "recurrence",
    "split_rows",
    "verify",
]

Array = NDArray[np.float64]
Parents = Sequence[int] | NDArray[np.integer[Any]]
Live = Sequence[bool] | NDArray[np.bool_]

NORM_EPS = 1e-6  # inside the root, not beside it
SOFTPLUS_LINEAR = 20.0  # softplus(x) is x above this


@dataclass(frozen=True)
class Verified:
    """One request, verified.

    ``o`` [T, Hv, d_v] outputs, ``u`` [T, Hv, d_v] local deltas, ``states``
    [T, Hv, d_v, d_k] the state after each node, None unless asked for.
    """

    o: Array
    u: Array
    states: Array | None = None


def gates(a: ArrayLike, b: ArrayLike, A_log: ArrayLike, dt_bias: ArrayLike) -> tuple[Array, Array]:
    """Log decay g <= 0 (natural logarithm) and write gate beta, both [T, Hv].

    g = -exp(A_log) softplus(a + dt_bias), softplus linear above 20; beta = sigmoid(b). ``a``
    and ``b`` are [T, Hv], ``A_log`` and ``dt_bias`` [Hv]. Where exp(A_log) overflows g is
    -inf, a decay of exactly 0: a cut. Source: docs/theory.md, SGLang's fused gating.
    """
    rate, step, write = _float(A_log), _float(a) + _float(dt_bias), _float(b)
    with np.errstate(over="ignore", invalid="ignore"):
        softplus = np.log1p(np.exp(np.minimum(step, SOFTPLUS_LINEAR)))
        softplus = np.where(step > SOFTPLUS_LINEAR, step, softplus)
        # far below zero softplus(x) is e^x, which may vanish where exp(A_log) overflows
        log_decay = np.where(step < -40, -np.exp(rate + step), -np.exp(rate) * softplus)
        return log_decay, 1 / (1 + np.exp(-write))


def convolve(
    parents: Parents,
    x: ArrayLike,
    window: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    live: Live | None = None,
) -> Array:
    """Causal depthwise convolution along each node's own path, then SiLU: rows [T, C].

    ``x`` [T, C] pre-convolution rows, ``window`` [C, W-1] committed rows, oldest first,
    ``weight`` [C, W] whose last column meets the node itself, ``bias`` [C] or None. A node
    sees its own W-1 nearest ancestors, then the committed window, never a sibling.
    Raises TreeError for parents that are no tree. Source: docs/theory.md.
    """
    x, weight, window = _float(x), _float(weight), _float(window)
    out = np.zeros_like(x)
    for node in _walk(parents, live):
        tail = _tail(find_path(parents, node), x, window, weight.shape[1])
        out[node] = (tail * weight).sum(axis=1) + (0 if bias is None else _float(bias))
    with np.errstate(over="ignore"):
        out /= 1 + np.exp(-out)
    return out


def split_rows(
    rows: ArrayLike, *, key_heads: int, value_heads: int, d_k: int
) -> tuple[Array, Array, Array]:
    """Rows q|k|v [T, C] as q, k [T, Hk, d_k] and v [T, Hv, d_v]; d_v follows from C."""
    rows = _float(rows)
    q, k, v = np.split(rows, (key_heads * d_k, 2 * key_heads * d_k), axis=1)
    q, k = (x.reshape(len(rows), key_heads, d_k) for x in (q, k))
    return q, k, v.reshape(len(rows), value_heads, v.shape[1] // value_heads)


def normalise(q: ArrayLike, k: ArrayLike) -> tuple[Array, Array]:
    """Unit q and k over the last axis, q then scaled by d_k^-1/2; same shapes.

    x / sqrt(sum x^2 + 1e-6), the epsilon inside the root. Source: docs/theory.md.
    """
    return _unit(_float(q)) * np.shape(q)[-1] ** -0.5, _unit(_float(k))


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
) -> Verified:
    """Every node from its parent's state, one after another.

    S_i = e^g_i S_p(i) + k_i u_i^T, u_i = beta_i (v_i - e^g_i S_p(i)^T k_i), o_i = S_i^T q_i
    (docs/theory.md; Bole, section II-A). ``q``, ``k`` [T, Hk, d_k] after the norm, ``v``
    [T, Hv, d_v], ``log_decay`` and ``beta`` [T, Hv], ``state`` [Hv, d_v, d_k], the pool's
    layout, that is S transposed. Value head h uses key head h // (Hv / Hk). Raises TreeError
    for parents that are no tree or a live mask with holes.
    """
    q, k, v, decay, beta = _spread(q, k, v, log_decay, beta)
    o, u = np.zeros_like(v), np.zeros_like(v)
    states = np.zeros((len(v), *np.shape(state))) if keep_states else None
    order = _walk(parents, live)
    # a state is dropped after its last child: 256 states of one layer are a gigabyte
    last_child = {int(parents[node]): node for node in order}
    alive: dict[int, Array] = {-1: _float(state)}
    for node in order:
        parent = int(parents[node])
        decayed = alive[parent] * decay[node, :, None, None]
        u[node] = beta[node, :, None] * (v[node] - _apply(decayed, k[node]))
        decayed += u[node, :, :, None] * k[node, :, None, :]
        o[node] = _apply(decayed, q[node])
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
    a: ArrayLike,
    b: ArrayLike,
    conv_weight: ArrayLike,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    state: ArrayLike,
    conv_state: ArrayLike,
    *,
    key_heads: int,
    conv_bias: ArrayLike | None = None,
    live: Live | None = None,
    round_rows: Callable[[Array], Array] | None = None,
    keep_states: bool = False,
) -> Verified:
    """One layer of Gated DeltaNet for one request: convolution, norm, gates, recurrence.

    The arguments of an emitted ``verify`` without the batch axis; heads and dims follow from
    ``state`` [Hv, d_v, d_k]. ``round_rows`` rounds the convolved rows [T, C] to the
    activations' dtype, the one rounding that the contract allows (docs/theory.md).
    """
    value_heads, _, d_k = np.shape(state)
    rows = convolve(parents, x, conv_state, conv_weight, conv_bias, live=live)
    if round_rows is not None:
        rows = _float(round_rows(rows))
    q, k, v = split_rows(rows, key_heads=key_heads, value_heads=value_heads, d_k=d_k)
    q, k = normalise(q, k)
    return recurrence(
        parents, q, k, v, *gates(a, b, A_log, dt_bias), state, live=live, keep_states=keep_states
    )


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
) -> Array:
    """The state [Hv, d_v, d_k] after the path to ``last_node``, the last accepted node.

    Arguments as in `recurrence`. -1, a dead node or one that is not there commits nothing.
    Only the path is read.
    """
    _, k, v, decay, beta = _spread(k, k, v, log_decay, beta)
    current = _float(state).copy()
    for node in find_path(parents, last_node, live=live):
        current *= decay[node, :, None, None]
        u = beta[node, :, None] * (v[node] - _apply(current, k[node]))
        current += u[:, :, None] * k[node, :, None, :]
    return current


def committed_window(
    parents: Parents, last_node: int, x: ArrayLike, window: ArrayLike, *, live: Live | None = None
) -> Array:
    """The convolution window [C, W-1], oldest first, after the path to ``last_node``.

    The last W-1 raw rows of committed window and path; ``x`` [T, C] raw rows. -1, a
    dead node or one that is not there commits nothing.
    """
    window = _float(window)
    return _tail(find_path(parents, last_node, live=live), _float(x), window, window.shape[1])


def find_path(parents: Parents, node: int, *, live: Live | None = None) -> list[int]:
    """Nodes from the root to ``node``, both included.

    Empty where there is no such node, or a dead one. Raises TreeError where a parent does
    not come before its child.
    """
    node = int(node)
    if not 0 <= node < len(parents) or (live is not None and not live[node]):
        return []
    path = [node]
    while path[-1] > 0:
        path.append(_parent(parents, path[-1]))
    return path[::-1]


def _tail(path: list[int], x: Array, window: Array, length: int) -> Array:
    """The last ``length`` rows of the committed window followed by the path, [C, length]."""
    rows = [x[node] for node in path[-length:]]
    committed = window[:, window.shape[1] - (length - len(rows)) :]
    return np.concatenate([committed, *(row[:, None] for row in rows)], axis=1)


def _parent(parents: Parents, node: int) -> int:
    """The parent of ``node``, TreeError where that makes no tree."""
    parent = int(parents[node])
    if parent != -1 if node == 0 else not 0 <= parent < node:
        raise TreeError(
            f"node {node} has parent {parent}; the root, node 0, has -1 and every other node a "
            "parent with a smaller number"
        )
    return parent


def _walk(parents: Parents, live: Live | None) -> list[int]:
    """Live nodes, parents first; TreeError where they are no tree."""
    order: list[int] = []
    for node in range(len(parents)):
        if live is not None and not live[node]:
            continue
        parent = _parent(parents, node)
        if live is not None and parent >= 0 and not live[parent]:
            raise TreeError(
                f"node {node} is live but its parent {parent} is dead; live is prefix-closed: "
                "set the parent live or the node dead"
            )
        order.append(node)
    return order


def _spread(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, log_decay: ArrayLike, beta: ArrayLike
) -> tuple[Array, Array, Array, Array, Array]:
    """Float64 operands with keys repeated for every value head, and the decay itself."""
    v = _float(v)
    ratio = v.shape[1] // np.shape(k)[1]
    q, k = (np.repeat(_float(x), ratio, axis=1) for x in (q, k))
    return q, k, v, np.exp(_float(log_decay)), _float(beta)


def _unit(x: Array) -> Array:
    root: Array = np.sqrt((x * x).sum(axis=-1, keepdims=True) + NORM_EPS)
    return x / root


def _apply(state: Array, row: Array) -> Array:
    """S^T x for every head: [Hv, d_v, d_k], [Hv, d_k] -> [Hv, d_v]."""
    product: Array = (state @ row[:, :, None])[:, :, 0]
    return product


def _float(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)

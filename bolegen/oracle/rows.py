"""Rows of a layer before the recurrence: convolution, parts, norm, and the window that is kept."""

import numpy as np
from numpy.typing import ArrayLike

from bolegen.ir import GDN, Mixer
from bolegen.oracle.paths import Array, Live, Parents, as_float, find_path, walk_nodes

__all__ = ["committed_window", "convolve", "normalise", "split_rows"]

NORM_EPS = 1e-6  # inside the root, not beside it


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
    x, weight, window = as_float(x), as_float(weight), as_float(window)
    out = np.zeros_like(x)
    for node in walk_nodes(parents, live):
        tail = _tail(find_path(parents, node), x, window, weight.shape[1])
        out[node] = (tail * weight).sum(axis=1) + (0 if bias is None else as_float(bias))
    with np.errstate(over="ignore"):
        out /= 1 + np.exp(-out)
    return out


def split_rows(
    rows: ArrayLike, *, key_heads: int, value_heads: int, d_k: int, mixer: Mixer = GDN
) -> tuple[Array, Array, Array]:
    """Rows [T, C] as q, k [T, Hk, d_k] and v [T, Hv, d_v]; d_v follows from C.

    Their parts come in the mixer's order: q|k|v, or v|k|q as Mamba2's x|B|C.
    """
    rows = as_float(rows)
    keys = key_heads * d_k
    sizes = {"q": keys, "k": keys, "v": rows.shape[1] - 2 * keys}
    ends = np.cumsum([sizes[part] for part in mixer.row])[:-1]
    parts = dict(zip(mixer.row, np.split(rows, ends, axis=1), strict=True))
    q, k = (parts[name].reshape(len(rows), key_heads, d_k) for name in "qk")
    return q, k, parts["v"].reshape(len(rows), value_heads, sizes["v"] // value_heads)


def normalise(q: ArrayLike, k: ArrayLike, mixer: Mixer = GDN) -> tuple[Array, Array]:
    """Unit q and k over the last axis, q then scaled by d_k^-1/2; same shapes.

    x / sqrt(sum x^2 + 1e-6), the epsilon inside the root (docs/theory.md). Unchanged where the
    mixer takes them as they are.
    """
    q, k = as_float(q), as_float(k)
    if not mixer.unit_keys:
        return q, k
    return _unit(q) * q.shape[-1] ** -0.5, _unit(k)


def committed_window(
    parents: Parents, last_node: int, x: ArrayLike, window: ArrayLike, *, live: Live | None = None
) -> Array:
    """The convolution window [C, W-1], oldest first, after the path to ``last_node``.

    The last W-1 raw rows of committed window and path; ``x`` [T, C] raw rows. -1, a
    dead node or one that is not there commits nothing.
    """
    window = as_float(window)
    return _tail(find_path(parents, last_node, live=live), as_float(x), window, window.shape[1])


def _tail(path: list[int], x: Array, window: Array, length: int) -> Array:
    """The last ``length`` rows of the committed window followed by the path, [C, length]."""
    rows = [x[node] for node in path[-length:]]
    committed = window[:, window.shape[1] - (length - len(rows)) :]
    return np.concatenate([committed, *(row[:, None] for row in rows)], axis=1)


def _unit(x: Array) -> Array:
    root: Array = np.sqrt((x * x).sum(axis=-1, keepdims=True) + NORM_EPS)
    return x / root

"""What every kernel must compute: the recurrence by definition, in float64, node by node.

This package is the only definition of meaning (docs/theory.md). It is written from the
equations alone: no closed form, no mask, no plan. All functions take one request and return
float64; inputs of any real dtype are widened first. Letters: T nodes, Hk and Hv key and value
heads, d_k and d_v dims, C = 2 Hk d_k + Hv d_v channels, W convolution width.

``parents`` [T] holds each node's parent, -1 for node 0. ``live`` [T] bool, None = all, is
prefix-closed: a dead node is never read, whatever it holds, and its results are zeros.
``mixer`` says which recurrence it is, Gated DeltaNet unless told otherwise.
"""

from bolegen.oracle.gates import gates
from bolegen.oracle.paths import Array, find_path
from bolegen.oracle.recurrence import Verified, committed_state, recurrence, verify
from bolegen.oracle.rows import committed_window, convolve, normalise, split_rows

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

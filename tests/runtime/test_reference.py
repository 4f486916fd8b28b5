"""The recurrence that the runtime carries is the oracle's, on every tree, with any node dead."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bolegen import oracle
from bolegen.ir import TreeTemplate
from bolegen_runtime.reference import Operands, Tree, advance, convolve, recur, shift
from support.strategies import live_masks, trees

HEADS, DIMS, WIDTH = (2, 4), (16, 24), 3
CHANNELS = 2 * HEADS[0] * DIMS[0] + HEADS[1] * DIMS[1]


def draw(nodes: int, seed: int, rate: float) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    shapes = {
        "rows": (nodes, CHANNELS), "x": (nodes, CHANNELS), "a": (nodes, HEADS[1]),
        "b": (nodes, HEADS[1]), "dt_bias": (HEADS[1],), "weight": (CHANNELS, WIDTH),
        "bias": (CHANNELS,), "window": (CHANNELS, WIDTH - 1), "state": (HEADS[1], *DIMS[::-1]),
    }  # fmt: skip
    drawn = {name: numbers.normal(size=shape) for name, shape in shapes.items()}
    # steps far from zero meet every branch of the softplus; rates overflow to a decay of 0
    drawn["a"] *= 30
    drawn["A_log"] = numbers.choice([-8.0, 0.0, rate], HEADS[1])
    return drawn


def close(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-11)


@settings(max_examples=40)
@given(data=st.data(), tree=trees(12), seed=st.integers(0, 2**16), rate=st.sampled_from([1, 800]))
def test_it_is_the_oracle(data: st.DataObject, tree: TreeTemplate, seed: int, rate: float) -> None:
    parents = list(tree.parents or ())
    live = data.draw(live_masks(tree))
    n = draw(tree.nodes, seed, rate)
    for name in ("rows", "x", "a", "b"):
        n[name][~np.array(live)] = np.nan
    t = {name: torch.from_numpy(value) for name, value in n.items()}
    here = Tree(parents, live)

    conv = oracle.convolve(parents, n["x"], n["window"], n["weight"], n["bias"], live=live)
    close(convolve(here, t["x"], t["window"], t["weight"], t["bias"]), conv)

    q, k, v = oracle.split_rows(n["rows"], key_heads=2, value_heads=4, d_k=DIMS[0])
    q, k = oracle.normalise(q, k)
    g, beta = oracle.gates(n["a"], n["b"], n["A_log"], n["dt_bias"])
    known = Operands.of(t["rows"], (t["a"], t["b"], t["A_log"], t["dt_bias"]), HEADS, DIMS[0])
    want = oracle.recurrence(parents, q, k, v, g, beta, n["state"], live=live)
    close(recur(here, known, t["state"]), want.o)

    for last in (-1, tree.nodes - 1, tree.nodes):
        path = here.path(last)
        assert path == oracle.find_path(parents, last, live=live)
        state = oracle.committed_state(parents, last, k, v, g, beta, n["state"], live=live)
        close(advance(path, known, t["state"]), state)
        window = oracle.committed_window(parents, last, n["x"], n["window"], live=live)
        assert np.array_equal(shift(path, t["x"], t["window"]).numpy(), window)


def test_a_wide_level_is_taken_in_pieces() -> None:
    parents = [-1] + [0] * 70 + [70, 3]
    n = draw(73, 5, 1)
    t = {name: torch.from_numpy(value) for name, value in n.items()}
    known = Operands.of(t["rows"], (t["a"], t["b"], t["A_log"], t["dt_bias"]), HEADS, DIMS[0])
    q, k, v = oracle.split_rows(n["rows"], key_heads=2, value_heads=4, d_k=DIMS[0])
    gates = oracle.gates(n["a"], n["b"], n["A_log"], n["dt_bias"])
    want = oracle.recurrence(parents, *oracle.normalise(q, k), v, *gates, n["state"])
    close(recur(Tree(parents, [True] * 73), known, t["state"]), want.o)

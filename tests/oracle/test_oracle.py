import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bolegen import oracle
from bolegen.errors import TreeError
from bolegen.ir import GDN, MIXERS, Decay, LayerSpec, Mixer, TreeTemplate
from support.strategies import draw_gates, heads, layer_specs, live_masks, trees

FAN = [-1, 0, 0, 1, 2]
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())


def layer(spec: LayerSpec, nodes: int, seed: int) -> dict[str, Any]:
    """Arguments of oracle.verify, None for those that the mixer does not have."""
    numbers, mixer = np.random.default_rng(seed), spec.mixer
    channels, heads_ = spec.channels, spec.value_heads
    by_channel = (spec.d_k,) if mixer.decay is Decay.CHANNEL else ()
    shapes = {
        "x": (nodes, channels),
        "a": (nodes, heads_, *by_channel),
        "b": (nodes, heads_),
        "conv_weight": (channels, spec.conv),
        "A_log": (heads_,),
        "dt_bias": (heads_, *by_channel),
        "state": (heads_, spec.d_v, spec.d_k),
        "conv_state": (channels, spec.conv - 1),
    }
    drawn: dict[str, Any] = {name: numbers.normal(size=s) for name, s in shapes.items()}
    unread = {"a", "b", "A_log", "dt_bias"}.difference(mixer.arguments)
    unread |= set() if mixer.convolved else {"conv_weight", "conv_state"}
    skip = {"D": numbers.normal(size=heads_)} if mixer.skip else {}
    return drawn | dict.fromkeys(unread) | skip | {"mixer": mixer, "key_heads": spec.key_heads}


def by_path(
    parents: tuple[int, ...], node: int, head: int, *operands: Any, mixer: Mixer = GDN, skip: Any
) -> Any:
    """One node of one value head, from the root on, number by number."""
    q, k, v, g, beta, state = operands
    d_v, d_k = state.shape[1:]
    shared = head // (v.shape[1] // k.shape[1])
    s = [[float(state[head, c, r]) for c in range(d_v)] for r in range(d_k)]
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    for i in path:
        decay = [math.exp(each) for each in np.broadcast_to(g[i, head], d_k)]
        key, query = k[i, shared], q[i, shared]
        s = [[decay[r] * entry for entry in row] for r, row in enumerate(s)]
        known = [mixer.delta * sum(s[r][c] * key[r] for r in range(d_k)) for c in range(d_v)]
        u = [beta[i, head] * (v[i, head, c] - known[c]) for c in range(d_v)]
        s = [[s[r][c] + key[r] * u[c] for c in range(d_v)] for r in range(d_k)]
        o = [sum(s[r][c] * query[r] for r in range(d_k)) for c in range(d_v)]
        o = [o[c] + skip[head] * v[i, head, c] for c in range(d_v)]
    return o, u, np.array(s).T


@every_mixer
@settings(max_examples=8)
@given(st.data())
def test_recurrence_equals_every_path_by_itself(mixer: Mixer, data: st.DataObject) -> None:
    tree = data.draw(trees(8))
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    key_heads, ratio, d_k, d_v = data.draw(st.sampled_from([(1, 1, 3, 2), (2, 3, 2, 4)]))
    q, k = numbers.normal(size=(2, tree.nodes, key_heads, d_k))
    q, k = oracle.normalise(q, k, mixer)
    v = numbers.normal(size=(tree.nodes, key_heads * ratio, d_v))
    g, beta = draw_gates(mixer, numbers, (tree.nodes, key_heads * ratio), d_k=d_k)
    state = numbers.normal(size=(key_heads * ratio, d_v, d_k))
    skip = numbers.normal(size=key_heads * ratio) if mixer.skip else None
    assert tree.parents is not None
    got = oracle.recurrence(
        tree.parents, q, k, v, g, beta, state, keep_states=True, mixer=mixer, D=skip
    )
    assert got.states is not None
    know: dict[str, Any] = {"mixer": mixer, "skip": np.zeros(v.shape[1]) if skip is None else skip}
    for node in range(tree.nodes):
        for head in range(v.shape[1]):
            o, u, s = by_path(tree.parents, node, head, q, k, v, g, beta, state, **know)
            np.testing.assert_allclose(got.o[node, head], o, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(got.u[node, head], u, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(got.states[node, head], s, rtol=1e-12, atol=1e-13)


@every_mixer
@settings(max_examples=10)
@given(st.data())
def test_commit_gives_the_state_of_the_accepted_node(mixer: Mixer, data: st.DataObject) -> None:
    tree = data.draw(trees(16))
    q, k, v, g, beta, state = data.draw(heads(tree.nodes, mixer))
    know: dict[str, Any] = {"mixer": mixer}
    assert tree.parents is not None
    states = oracle.recurrence(
        tree.parents, q, k, v, g, beta, state, keep_states=True, **know
    ).states
    assert states is not None
    for node in range(tree.nodes):
        got = oracle.committed_state(tree.parents, node, k, v, g, beta, state, **know)
        assert np.array_equal(got, states[node])


@pytest.mark.parametrize("last", [-1, -7, 5, 10**9])
def test_a_node_that_is_not_there_commits_nothing(last: int) -> None:
    numbers = np.random.default_rng(0)
    k, v = numbers.normal(size=(2, 5, 1, 4))
    state, window = numbers.normal(size=(1, 4, 4)), numbers.normal(size=(12, 3))
    g = beta = numbers.normal(size=(5, 1))
    assert np.array_equal(oracle.committed_state(FAN, last, k, v, g, beta, state), state)
    rows = numbers.normal(size=(5, 12))
    assert np.array_equal(oracle.committed_window(FAN, last, rows, window), window)


def test_a_dead_node_commits_nothing() -> None:
    live = [True, True, False, True, False]
    rows, window = np.arange(10.0).reshape(5, 2), np.zeros((2, 3))
    assert not oracle.committed_window(FAN, 4, rows, window, live=live).any()
    got = oracle.committed_window(FAN, 3, rows, window, live=live)
    assert got.tolist() == [[0, 2, 6], [1, 3, 7]]


@settings(max_examples=20)
@given(st.data())
def test_dead_nodes_are_zero_and_change_nothing(data: st.DataObject) -> None:
    tree = data.draw(trees(12))
    spec = data.draw(layer_specs())
    live = np.array(data.draw(live_masks(tree)))
    operands = layer(spec, tree.nodes, data.draw(st.integers(0, 99)))
    assert tree.parents is not None
    want = oracle.verify(tree.parents, **operands)
    for name in ("x", "a", "b"):
        if operands[name] is not None:
            operands[name][~live] = np.nan
    got = oracle.verify(tree.parents, **operands, live=live)
    assert np.array_equal(got.o[live], want.o[live])
    assert np.array_equal(got.u[live], want.u[live])
    assert not got.o[~live].any()
    assert not got.u[~live].any()


@every_mixer
def test_siblings_do_not_meet(mixer: Mixer) -> None:
    spec = LayerSpec(mixer, key_heads=1, value_heads=2, d_k=16, d_v=16)
    operands = layer(spec, 5, 3)
    before = oracle.verify(FAN, **operands)
    for name in ("x", "a", "b"):
        if operands[name] is not None:
            operands[name][[1, 3]] *= -3
    after = oracle.verify(FAN, **operands)
    assert np.array_equal(before.o[[0, 2, 4]], after.o[[0, 2, 4]])
    assert (before.o[[1, 3]] != after.o[[1, 3]]).any()


@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_window_runs_from_a_node_to_the_committed_rows(width: int) -> None:
    # a channel that counts: what a node sees can be read off one number a digit
    x = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])
    window = np.array([[7.0, 8.0, 9.0][4 - width :]])
    weight = 10.0 ** np.arange(width)[None, ::-1]
    seen = {0: "7891", 1: "8912", 2: "8913", 3: "9124", 4: "9135"}
    rows = oracle.convolve(FAN, x, window, weight)
    for node, digits in seen.items():
        total = float(digits[-width:])
        assert rows[node, 0] == pytest.approx(total / (1 + math.exp(-total)), rel=1e-14)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_committed_window_is_the_last_rows_of_the_accepted_path(width: int) -> None:
    x = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])
    window = np.array([[7.0, 8.0, 9.0][4 - width :]])
    for node, rows in {0: [8, 9, 1], 2: [9, 1, 3], 4: [1, 3, 5]}.items():
        got = oracle.committed_window(FAN, node, x, window)
        assert got[0].tolist() == rows[4 - width :]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_committing_a_chain_and_going_on_is_one_longer_convolution(width: int) -> None:
    numbers = np.random.default_rng(width)
    x, weight = numbers.normal(size=(9, 5)), numbers.normal(size=(5, width))
    window, bias = numbers.normal(size=(5, width - 1)), numbers.normal(size=5)
    whole = oracle.convolve(range(-1, 8), x, window, weight, bias)
    for cut in range(1, 9):
        moved = oracle.committed_window(range(-1, 8), cut - 1, x, window)
        rest = oracle.convolve(range(-1, 8 - cut), x[cut:], moved, weight, bias)
        np.testing.assert_allclose(rest, whole[cut:], rtol=1e-13)


def test_a_decay_of_zero_is_a_cut() -> None:
    numbers = np.random.default_rng(1)
    q, k = oracle.normalise(*numbers.normal(size=(2, 3, 1, 4)))
    v, state = numbers.normal(size=(3, 1, 2)), numbers.normal(size=(1, 2, 4))
    g, beta = np.array([[-0.1], [-np.inf], [-0.2]]), np.full((3, 1), 0.5)
    whole = oracle.recurrence([-1, 0, 1], q, k, v, g, beta, state)
    fresh = oracle.recurrence([-1, 0], q[1:], k[1:], v[1:], g[1:], beta[1:], state * 0)
    assert np.array_equal(whole.o[1:], fresh.o)
    assert np.isfinite(whole.o).all()


def test_norm_has_its_epsilon_inside_the_root() -> None:
    q = k = np.array([[[3e-3, 4e-3]]])
    unit, key = oracle.normalise(q, k)
    assert key[0, 0, 0] == pytest.approx(3e-3 / math.sqrt(25e-6 + 1e-6), rel=1e-14)
    np.testing.assert_allclose(unit, key / math.sqrt(2), rtol=1e-15)
    assert not oracle.normalise(q * 0, k * 0)[1].any()


def test_value_heads_share_the_key_head_before_them() -> None:
    numbers = np.random.default_rng(2)
    q, k = numbers.normal(size=(2, 1, 2, 4))
    v, state = numbers.normal(size=(1, 6, 3)), numbers.normal(size=(6, 3, 4))
    g, beta = np.zeros((1, 6)), np.ones((1, 6))
    got = oracle.recurrence([-1], q, k, v, g, beta, state)
    for head in range(6):
        shared = slice(head // 3, head // 3 + 1)
        one = slice(head, head + 1)
        alone = oracle.recurrence(
            [-1], q[:, shared], k[:, shared], v[:, one], g[:, one], beta[:, one], state[one]
        )
        np.testing.assert_allclose(got.o[:, one], alone.o, rtol=1e-14)


@every_mixer
def test_rows_split_in_the_mixers_order(mixer: Mixer) -> None:
    rows = np.arange(2 * 22.0).reshape(2, 22)
    q, k, v = oracle.split_rows(rows, key_heads=2, value_heads=2, d_k=3, mixer=mixer)
    assert (q.shape, k.shape, v.shape) == ((2, 2, 3), (2, 2, 3), (2, 2, 5))
    # Mamba2's x|B|C: what is written, what it is written under, what reads it
    want = (19, 10, 31) if mixer.name == "mamba2" else (3, 6, 43)
    assert (q[0, 1, 0], k[0, 0, 0], v[1, 1, 4]) == want


@every_mixer
def test_a_layer_is_its_parts_one_after_another(mixer: Mixer) -> None:
    spec = LayerSpec(mixer, key_heads=2, value_heads=6, d_k=16, d_v=24)
    given = layer(spec, 5, 8)
    rows = given["x"]
    if mixer.convolved:
        rows = oracle.convolve(FAN, rows, given["conv_state"], given["conv_weight"])
    shape = {"key_heads": 2, "value_heads": 6, "d_k": 16}
    q, k, v = oracle.split_rows(rows, **shape, mixer=mixer)
    if mixer.unit_keys:
        q, k = oracle.normalise(q, k)
    names = ("a", "b", "A_log", "dt_bias")
    gates = oracle.gates(*(given[name] for name in names), mixer=mixer, nodes=5)
    options: dict[str, Any] = {"mixer": mixer, "D": given.get("D")}
    want = oracle.recurrence(FAN, q, k, v, *gates, given["state"], **options)
    assert np.array_equal(oracle.verify(FAN, **given).o, want.o)
    assert want.o.any()


def test_rows_are_rounded_once_between_convolution_and_norm() -> None:
    spec = LayerSpec(key_heads=1, value_heads=1, d_k=16, d_v=16)
    operands = layer(spec, 5, 4)
    seen = []

    def keep(rows: oracle.Array) -> oracle.Array:
        seen.append(rows)
        return rows.astype(np.float16)

    got = oracle.verify(FAN, **operands, round_rows=keep)
    exact = oracle.verify(FAN, **operands)
    assert len(seen) == 1
    assert 0 < np.abs(got.o - exact.o).max() < 1e-2


@pytest.mark.parametrize("parents", [[0], [-1, -1], [-1, 1], [-1, 2, 0], [-1, 0, -5]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    rows = np.ones((len(parents), 3))
    with pytest.raises(TreeError, match="has parent"):
        oracle.convolve(parents, rows, np.ones((3, 1)), np.ones((3, 2)))


def test_a_live_mask_with_a_hole_is_refused() -> None:
    with pytest.raises(TreeError, match="node 3 is live but its parent 1 is dead"):
        oracle.convolve(
            FAN,
            np.ones((5, 3)),
            np.ones((3, 1)),
            np.ones((3, 2)),
            live=[True, False, True, True, True],
        )


def test_whole_layers_of_256_nodes_are_within_reach() -> None:
    numbers = np.random.default_rng(5)
    tree = TreeTemplate.from_parents([-1, *(int(numbers.integers(0, i)) for i in range(1, 256))])
    spec = LayerSpec(key_heads=2, value_heads=4, d_k=64, d_v=64)
    assert tree.parents is not None
    got = oracle.verify(tree.parents, **layer(spec, 256, 6))
    assert np.isfinite(got.o).all()
    assert got.states is None

"""Hypothesis strategies: trees, live masks, layer shapes, gates, operands of one head."""

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from bolegen.interpret import Operands
from bolegen.ir import GDN, MIXERS, Decay, DType, LayerSpec, Mixer, TreeTemplate
from bolegen.oracle import Array, normalise

__all__ = ["draw_gates", "heads", "layer_specs", "live_masks", "one_head", "trees"]

# two busy cores say nothing about a test; under CI the built-in profile still derandomises
settings.register_profile("bolegen", settings(), deadline=None)
settings.load_profile("bolegen")


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40, min_nodes: int = 1) -> TreeTemplate:
    """A parent for each node, by its distance: shrinks to short chains."""
    nodes = draw(st.integers(min_nodes, max_nodes))
    back = [draw(st.integers(1, node)) for node in range(1, nodes)]
    return TreeTemplate.from_parents([-1, *(node - d for node, d in enumerate(back, 1))])


@st.composite
def live_masks(draw: st.DrawFn, tree: TreeTemplate) -> list[bool]:
    """Prefix-closed: a node can be live where its parent is."""
    live: list[bool] = []
    for parent in tree.parents or ():
        live.append((parent < 0 or live[parent]) and draw(st.booleans()))
    return live


@st.composite
def layer_specs(draw: st.DrawFn) -> LayerSpec:
    """Small layers, sizes off powers of two among them."""
    key_heads, ratio = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 1)]))
    return LayerSpec(
        mixer=draw(st.sampled_from(list(MIXERS.values()))),
        key_heads=key_heads,
        value_heads=key_heads * ratio,
        d_k=draw(st.sampled_from([16, 24, 40, 64])),
        d_v=draw(st.sampled_from([16, 24, 56])),
        conv=draw(st.integers(2, 4)),
        dtype=draw(st.sampled_from(DType)),
    )


def draw_gates(
    mixer: Mixer,
    numbers: np.random.Generator,
    shape: tuple[int, int],
    size: float = 1.0,
    d_k: int = 1,
) -> tuple[Array, Array]:
    """Log decays and write gates [T, Hv] such as the mixer's formulas give; decays by channel of
    which there are ``d_k`` are [T, Hv, d_k]."""  # fmt: skip
    log_decay = -numbers.exponential(size, shape)
    if mixer.decay is Decay.CHANNEL:
        log_decay = -numbers.exponential(size, (*shape, d_k))
    if mixer.decay is Decay.NONE:
        log_decay = np.zeros(shape)
    if mixer.decay is Decay.CONSTANT:
        log_decay[:] = log_decay[0]
    beta = numbers.random(shape)
    if mixer.write_gate == "1":
        return log_decay, np.ones(shape)
    largest = {"sigmoid(b)": 1, "2 sigmoid(b)": 2, "softplus(a + dt_bias)": 5}[mixer.write_gate]
    return log_decay, largest * beta


@st.composite
def heads(draw: st.DrawFn, nodes: int, mixer: Mixer = GDN) -> tuple[Array, ...]:
    """q, k, v, log decay, beta, state of one request with one head; some decays are 0.

    Numbers come from a drawn seed: their values matter less than the tree's shape.
    """
    numbers = np.random.default_rng(draw(st.integers(0, 2**16)))
    d_k, d_v = draw(st.sampled_from([(4, 3), (16, 8)]))
    q, k = numbers.normal(size=(2, nodes, 1, d_k))
    q, k = normalise(q, k, mixer)
    size = draw(st.sampled_from([0.1, 2.0, 20.0]))
    log_decay, beta = draw_gates(mixer, numbers, (nodes, 1), size, d_k)
    cut = draw(st.sampled_from([0.0, 0.2]))
    if mixer.decay not in (Decay.NONE, Decay.CONSTANT):
        log_decay[numbers.random((nodes, 1)) < cut] = -np.inf
    v, state = numbers.normal(size=(nodes, 1, d_v)), numbers.normal(size=(1, d_v, d_k))
    return q, k, v, log_decay, beta, state


def one_head(head: tuple[Array, ...], parents: Sequence[int] = ()) -> Operands:
    """What `heads` draws, as the operands of the closed form."""
    q, k, v, log_decay, beta, state = head
    return Operands.from_arrays(
        q[:, 0], k[:, 0], v[:, 0], np.exp(log_decay[:, 0]), beta[:, 0], state[0], parents
    )

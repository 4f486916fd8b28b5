"""Every mixer on the device, at the shapes of models that have it."""

import random
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen.ir import MIXERS, DType
from support.judge import check_commit, check_verify, same_bits
from support.rounds import Round, build, make_round, play, poison
from support.trees import draw_tree

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES: dict[str, dict[str, int]] = {
    "gdn": {"key_heads": 16, "value_heads": 32, "d_k": 128, "d_v": 128},
    "gdn_neg": {"key_heads": 30, "value_heads": 30, "d_k": 96, "d_v": 192},
    "deltanet": {"key_heads": 16, "value_heads": 16, "d_k": 128, "d_v": 128},
    "mamba2": {"key_heads": 8, "value_heads": 64, "d_k": 128, "d_v": 64},
    "lightning": {"key_heads": 32, "value_heads": 32, "d_k": 128, "d_v": 128},
}
# state 256, one group for all heads
WIDE: dict[str, dict[str, int]] = {
    name: {"key_heads": 1, "value_heads": 24, "d_k": 256, "d_v": 128}
    for name, mixer in MIXERS.items()
    if not mixer.delta
}
TREE = draw_tree(random.Random(1), 64, 8)
every_mixer = pytest.mark.parametrize("mixer", MIXERS)
templates = pytest.mark.parametrize("template", ["(3,3,3)", "any:64"])


def made(mixer: str, template: str, batch: int, **layer: Any) -> tuple[ModuleType, Round]:
    m = build(template, depth=8, mixer=mixer, **SHAPES[mixer] | layer)
    trees = [TREE] * batch if m.MODULE.parents is None else None
    r = make_round(m, batch=batch, slots=batch + 2, trees=trees, device=DEVICE)
    if batch > 2:
        r.slots[2] = -1
    return m, r


def last_of(m: ModuleType, batch: int) -> list[int]:
    return [(m.MODULE.nodes - 1 - 7 * row) % m.MODULE.nodes for row in range(batch)]


@every_mixer
@pytest.mark.parametrize("layout", ["replay", "pku"])
@templates
def test_a_round(mixer: str, layout: str, template: str) -> None:
    m, r = made(mixer, template, 4, factors=layout)
    worst = play(m, r, last_of(m, 4))
    print(f"worst {worst}")
    worst.assert_within()


@every_mixer
@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP32])
def test_wider_activations_and_a_bf16_pool(mixer: str, dtype: DType) -> None:
    m, r = made(mixer, "(3,3,3)", 2, dtype=dtype, state_dtype=DType.BF16, factors="pku")
    r.x.mul_(0.25)  # without a norm, what fp16 holds
    worst = play(m, r, last_of(m, 2), convolved=True)
    print(f"worst {worst}")
    worst.assert_within()


@pytest.mark.parametrize("mixer", WIDE)
@templates
def test_a_state_of_256_and_decays_that_underflow(mixer: str, template: str) -> None:
    m, r = made(mixer, template, 2, **WIDE[mixer])
    r.A_log.fill_(3.0)
    worst = play(m, r, last_of(m, 2))
    print(f"worst {worst}")
    worst.assert_within()


def outcome(m: ModuleType, r: Round, last: list[int], overlap: bool) -> list[torch.Tensor]:
    r = r.with_clones()
    factors = poison(m.allocate(len(r.slots), 1, DEVICE))
    factors.overlap = factors.overlap and overlap
    out = r.verify(m, factors)
    r.commit(m, factors, last)
    return [out, r.state, r.conv_state]


@every_mixer
@templates
def test_bits_depend_on_no_mate_and_no_timing(mixer: str, template: str) -> None:
    m, r = made(mixer, template, 8)
    last = last_of(m, 8)
    once = outcome(m, r, last, False)
    for _ in range(5):
        again = outcome(m, r, last, True)
        assert all(same_bits(x, y) for x, y in zip(once, again, strict=True))
    part: dict[str, Any] = {name: getattr(r, name)[:, 5:6] for name in ("x", "a", "b")}
    part |= {"slots": r.slots[5:6], "parents": None if r.parents is None else r.parents[5:6]}
    out, state, _ = outcome(m, r.with_clones(**part), last[5:6], True)
    assert same_bits(out[0], once[0][5])
    assert same_bits(state[:, r.slots[5]], once[1][:, r.slots[5]])


@every_mixer
@templates
def test_a_graph_follows_new_contents(mixer: str, template: str) -> None:
    m, r = made(mixer, template, 3)
    factors, last = m.allocate(3, 1, DEVICE), last_of(m, 3)
    nodes = torch.tensor(last, device=DEVICE)
    windows = r.conv_state if MIXERS[mixer].convolved else None
    out = r.verify(m, factors).clone()  # compiles; checks contents
    m.commit(
        factors, r.state.clone(), None if windows is None else windows.clone(), r.slots, nodes
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        r.verify(m, factors, out=out)
        m.commit(factors, r.state, windows, r.slots, nodes)
    fresh = make_round(m, batch=3, slots=5, trees=r.trees, seed=9, device=DEVICE)
    for name in ("x", "a", "b", "state", "conv_state"):
        getattr(r, name).copy_(getattr(fresh, name))
    before = r.with_clones()
    poison(factors)
    graph.replay()
    torch.cuda.synchronize()
    worst = check_verify(m, before, out, factors)
    pools = (before.state, before.conv_state), (r.state, r.conv_state)
    (worst | check_commit(m, before, factors, *pools, last)).assert_within()
    eager = before.with_clones()
    other = poison(m.allocate(3, 1, DEVICE))
    assert same_bits(eager.verify(m, other), out)
    eager.commit(m, other, last)
    assert same_bits(eager.state, r.state)

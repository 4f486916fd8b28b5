"""Every mixer on the device, heads and dims of models: right, alone as in a batch, in a graph."""

import random
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bolegen.ir import DType, find_mixer
from support.judge import check_commit, check_verify, same_bits
from support.rounds import Round, build, make_round, poison
from support.rounds import play as play_judged
from support.trees import draw_tree

pytestmark = pytest.mark.gpu
NAN = float("nan")

LAYERS: dict[str, dict[str, int]] = {
    "gdn": {"key_heads": 16, "value_heads": 32, "d_k": 128, "d_v": 128},
    "gdn_neg": {"key_heads": 30, "value_heads": 30, "d_k": 96, "d_v": 192},
    "deltanet": {"key_heads": 16, "value_heads": 16, "d_k": 128, "d_v": 128},
    "kda": {"key_heads": 32, "value_heads": 32, "d_k": 128, "d_v": 128},
    "kda_bounded": {"key_heads": 48, "value_heads": 48, "d_k": 128, "d_v": 128},
    "mamba2": {"key_heads": 8, "value_heads": 128, "d_k": 128, "d_v": 64},
    "lightning": {"key_heads": 64, "value_heads": 64, "d_k": 128, "d_v": 128},
}
BATCH = 17  # as large as schedules tell apart
PADDED, JUDGED = 5, [0, 7, 16]


def module(mixer: str, template: str, layout: str = "replay") -> ModuleType:
    return build(template, depth=8, mixer=mixer, factors=layout, **LAYERS[mixer])


def draw(m: ModuleType, seed: int = 0, layers: int = 1) -> tuple[Round, list[int]]:
    """Rows that draft different trees, one of them padded, some with dead nodes; what they
    accept.
    """
    gen = random.Random(seed)
    nodes, trees = m.MODULE.nodes, None
    if m.MODULE.parents is None:
        trees = [draw_tree(gen, nodes, 8) for _ in range(BATCH)]
    bias = find_mixer(m.MODULE.mixer).name == "mamba2"
    r = make_round(
        m, batch=BATCH, layers=layers, slots=BATCH + 2, seed=seed, trees=trees, bias=bias,
        device="cuda",
    )  # fmt: skip
    r.slots[PADDED] = -1
    counts = [nodes if row % 3 else gen.randint(nodes // 2, nodes) for row in range(BATCH)]
    # a node's number is above its parent's, so a prefix is closed
    r.live = (
        torch.arange(nodes, device="cuda")[None] < torch.tensor(counts, device="cuda")[:, None]
    )
    return r, [gen.randrange(count) for count in counts]


def play(m: ModuleType, r: Round, last: list[int]) -> tuple[Round, list[torch.Tensor], Any]:
    """What one round on poisoned memory leaves: pools, outputs, factors."""
    r = r.with_clones()
    factors = poison(m.allocate(len(r.slots), 1, "cuda"))
    out = r.verify(m, factors)
    rows = factors.convolved_rows(0).clone()
    u = None if factors.u is None else factors.u.clone()
    r.commit(m, factors, last)
    held = SimpleNamespace(convolved=factors.convolved, u=u, convolved_rows=lambda _: rows)
    return r, [out, r.state, r.conv_state], held


def pick(r: Round, rows: list[int]) -> Round:
    """Some rows of a round, on the same pools."""
    parts = {name: getattr(r, name)[:, rows] for name in ("x", "a", "b")}
    parents = None if r.parents is None else r.parents[rows]
    live = None if r.live is None else r.live[rows]
    trees = [r.trees[row] for row in rows]
    return replace(r, **parts, slots=r.slots[rows], parents=parents, live=live, trees=trees)


def judge(m: ModuleType, r: Round, last: list[int], after: Round, out: Any, held: Any) -> None:
    """The judged rows beside the oracle; the other rows' slots are left out."""
    some = SimpleNamespace(
        convolved=held.convolved,
        u=None if held.u is None else held.u[:, JUDGED],
        convolved_rows=lambda layer: held.convolved_rows(layer)[JUDGED],
    )
    picked, slots = pick(r, JUDGED), r.slots[JUDGED]
    pools = []
    for before, written in ((r.state, after.state), (r.conv_state, after.conv_state)):
        pool = before.clone()
        pool[:, slots] = written[:, slots]
        pools.append(pool)
    worst = check_verify(m, picked, out[JUDGED], some)
    before_pools, after_pools = (r.state, r.conv_state), (pools[0], pools[1])
    lasts = [last[row] for row in JUDGED]
    worst |= check_commit(m, picked, some, before_pools, after_pools, lasts)
    print(f"worst {worst}")
    worst.assert_within()


@pytest.mark.parametrize("layout", ["replay", "pku"])
@pytest.mark.parametrize("template", ["(3,3,3)", "any:64"])
@pytest.mark.parametrize("mixer", LAYERS)
def test_a_round_is_right_whatever_lies_beside_it(mixer: str, template: str, layout: str) -> None:
    m = module(mixer, template, layout)
    r, last = draw(m)
    after, clean, held = play(m, r, last)
    judge(m, r, last, after, clean[0], held)

    used = r.slots[r.slots >= 0]
    others = [slot for slot in range(r.state.shape[1]) if slot not in used.tolist()]
    for pool, was in ((after.state, r.state), (after.conv_state, r.conv_state)):
        assert same_bits(pool[:, others], was[:, others])
    spoiled = r.with_clones()
    assert spoiled.live is not None
    for tensor in (spoiled.x, spoiled.a, spoiled.b):
        tensor[:, ~spoiled.live] = NAN
        tensor[:, PADDED] = NAN
    spoiled.state[:, others] = NAN
    spoiled.conv_state[:, others] = NAN
    _, dirty, _ = play(m, spoiled, last)
    assert same_bits(dirty[0], clean[0])
    for pool, want in zip(dirty[1:], clean[1:], strict=True):
        assert same_bits(pool[:, used], want[:, used])

    for row in JUDGED:
        slot = r.slots[row]
        _, alone, _ = play(m, pick(r, [row]), [last[row]])
        assert same_bits(alone[0][0], clean[0][row])
        for pool, want in zip(alone[1:], clean[1:], strict=True):
            assert same_bits(pool[:, slot], want[:, slot])


@pytest.mark.parametrize("mixer", LAYERS)
def test_a_graph_follows_new_trees_bit_for_bit(mixer: str) -> None:
    m = module(mixer, "any:64")
    rounds = [draw(m, seed, layers=2) for seed in range(3)]
    static = rounds[0][0].with_clones()
    factors = poison(m.allocate(BATCH, 2, "cuda"))
    nodes = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
    size = m.MODULE.nodes, m.MODULE.heads[1], m.MODULE.dims[1]
    outs = static.x.new_empty(2, BATCH, *size)

    def step(r: Round, f: Any, out: torch.Tensor) -> None:
        for layer in range(2):
            r.verify(m, f, layer, out=out[layer])
        m.commit(f, r.state, None if f.convolved else r.conv_state, r.slots, nodes)

    step(static, factors, outs)
    factors.check = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static, factors, outs)
    for r, last in rounds[::-1]:
        for name, value in vars(r).items():
            if isinstance(value, torch.Tensor):
                getattr(static, name).copy_(value)
        nodes.copy_(torch.tensor(last))
        poison(factors)
        graph.replay()
        eager, held = r.with_clones(), torch.empty_like(outs)
        other = poison(m.allocate(BATCH, 2, "cuda"))
        step(eager, other, held)
        assert same_bits(outs, held)
        assert same_bits(static.state, eager.state)
        assert same_bits(static.conv_state, eager.conv_state)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP32])
@pytest.mark.parametrize("mixer", LAYERS)
def test_wider_activations_and_a_bf16_pool(mixer: str, dtype: DType) -> None:
    options: dict[str, Any] = {"dtype": dtype, "state_dtype": DType.BF16, "factors": "pku"}
    m = build("(3,3,3)", depth=8, mixer=mixer, **LAYERS[mixer] | options)
    r = make_round(m, batch=2, slots=4, device="cuda")
    r.x.mul_(0.25)  # without a norm, what fp16 holds
    play_judged(m, r, [39, 32], convolved=True).assert_within()


@pytest.mark.parametrize("template", ["(3,3,3)", "any:64"])
@pytest.mark.parametrize("mixer", ["mamba2", "lightning"])
def test_a_state_of_256_and_decays_that_underflow(mixer: str, template: str) -> None:
    wide = {"key_heads": 1, "value_heads": 24, "d_k": 256, "d_v": 128}
    m = build(template, depth=8, mixer=mixer, **wide)
    trees = None if m.MODULE.parents else [draw_tree(random.Random(1), 64, 8)] * 2
    r = make_round(m, batch=2, slots=4, trees=trees, device="cuda")
    r.A_log.fill_(3.0)
    play_judged(m, r, [m.MODULE.nodes - 1, 32]).assert_within()


@pytest.mark.parametrize("mixer", LAYERS)
def test_bits_depend_on_no_timing(mixer: str) -> None:
    m = module(mixer, "any:64")
    r, last = draw(m)
    ends = []
    for overlap in (False, *[True] * 5):
        again = r.with_clones()
        factors = poison(m.allocate(BATCH, 1, "cuda"))
        factors.overlap = factors.overlap and overlap
        ends.append([again.verify(m, factors), again.state, again.conv_state])
        again.commit(m, factors, last)
    for end in ends[1:]:
        assert all(same_bits(x, y) for x, y in zip(end, ends[0], strict=True))

"""The exactness contract on the device: full shapes, odd ones, long rounds, CUDA graphs.

Each test prints its worst errors over their limits, which docs/validation.md shows.
"""

import random
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen.ir import DType, TreeTemplate, spell_template
from support.drift import play_rounds
from support.judge import Worst, check_commit, check_verify, same_bits
from support.rounds import Round, build, make_round, play, poison
from support.trees import draw_tree

pytestmark = pytest.mark.gpu
FULL = {"key_heads": 16, "value_heads": 32, "d_k": 128, "d_v": 128}
SOME = {"key_heads": 2, "value_heads": 4, "d_k": 128, "d_v": 128}
SLOW: dict[str, Any] = {"log_rate": (-12.0, -6.0)}


def grow(nodes: int, depth: int, seed: int = 0) -> list[int]:
    return draw_tree(random.Random(seed), nodes, depth)


def spell(parents: list[int]) -> str:
    return spell_template(TreeTemplate.from_parents(parents))


def deepest(parents: list[int]) -> int:
    levels = TreeTemplate.from_parents(parents).levels
    return levels.index(max(levels))


def report(worst: Worst) -> None:
    print(f"worst {worst}")
    worst.assert_within()


@pytest.mark.parametrize("layout", ["replay", "pku"])
def test_the_9b_layer(layout: str) -> None:
    m = build("(3,3,3)", depth=8, factors=layout, **FULL)
    r = make_round(m, batch=8, slots=11, device="cuda", bias=layout == "pku")
    r.slots[3] = -1
    report(play(m, r, [39, 0, 13, 5, -1, 12, 38, 27]))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"template": "(3,3,3)", "dtype": DType.FP32, **SOME}, {}),
    "float16": ({"template": "(3,3,3)", "dtype": DType.FP16, "conv": 3, **SOME}, {}),
    "root alone": ({"template": "chain:0", "conv": 2, **SOME}, {}),
    "odd heads, bf16 state": (
        {
            "template": "(2,2,2)",
            "state_dtype": DType.BF16,
            "key_heads": 30,
            "value_heads": 30,
            "d_k": 96,
            "d_v": 192,
        },
        {},
    ),
    "largest dims": (
        {"template": "(3,3)", "key_heads": 3, "value_heads": 6, "d_k": 256, "d_v": 512},
        {},
    ),
    "smallest dims": ({"template": "chain:7", "value_heads": 1}, {}),
    "parallel keys, depth 31": (
        {"template": "chain:31", **SOME},
        {"repeat": 0.9, "write": 12.0, **SLOW},
    ),
    "parallel keys, depth 31, float32": (
        {"template": "chain:31", "dtype": DType.FP32, **SOME},
        {"repeat": 1.0, "write": 12.0, **SLOW},
    ),
    "parallel keys, depth 127": (
        {"template": "chain:127", **SOME},
        {"repeat": 0.9, "write": 2.0, **SLOW},
    ),
    "bf16 readout": ({"template": "(3,3,3)", "readout": "bf16", **SOME}, {}),
    "bf16 readout, parallel keys": (
        {"template": "chain:31", "readout": "bf16", **SOME},
        {"repeat": 0.9, "write": 12.0, **SLOW},
    ),
    "decays that underflow": ({"template": "chain:31", **SOME}, {"log_rate": (3.0, 5.0)}),
    "256 nodes": ({"template": spell(grow(256, 16, seed=3)), **SOME}, {}),
}


@pytest.mark.parametrize(("spec", "data"), CASES.values(), ids=CASES.keys())
def test_shapes_and_hostile_rows(spec: dict[str, Any], data: dict[str, Any]) -> None:
    m = build(factors="pku", **spec)
    r = make_round(m, device="cuda", **data)
    report(play(m, r, [deepest(tree) for tree in r.trees]))


@pytest.mark.parametrize("template", ["chain:31", "chain:127"])
def test_replay_of_a_long_path(template: str) -> None:
    m = build(template, **SOME)
    r = make_round(m, device="cuda", **SLOW)
    report(play(m, r, [m.MODULE.nodes - 1, m.MODULE.nodes // 2]))


def test_128_nodes_of_topology_at_run_time() -> None:
    m = build("any:128", depth=12, factors="pku", **SOME)
    trees = [grow(128, 12, seed) for seed in range(3)]
    r = make_round(m, batch=3, trees=trees, device="cuda")
    r.live = torch.ones(3, 128, dtype=torch.bool, device="cuda")
    # a node's number is above its parent's, so a prefix is closed
    r.live[1, 77:] = False
    report(play(m, r, [deepest(trees[0]), 76, 127]))


def outcome(
    m: ModuleType, r: Round, last: list[int], overlap: bool | None = None
) -> list[torch.Tensor]:
    r = r.with_clones()
    factors = poison(m.allocate(len(r.slots), 1, "cuda"))
    if overlap is not None:
        factors.overlap = overlap
    out = r.verify(m, factors)
    r.commit(m, factors, last)
    return [out, r.state, r.conv_state]


def test_bits_do_not_depend_on_mates_or_nan() -> None:
    m = build("(3,3,3)", depth=8, **FULL)
    r = make_round(m, batch=8, slots=9, device="cuda")
    last = [39, 0, 13, 5, 38, 12, 37, 27]
    once = outcome(m, r, last)
    assert all(same_bits(x, y) for x, y in zip(once, outcome(m, r, last), strict=True))
    spoiled = r.with_clones()
    spoiled.slots[1::2] = -1
    for tensor in (spoiled.x, spoiled.a, spoiled.b):
        tensor[:, 1::2] = float("nan")
    spoiled.state[:, r.slots[1::2]] = float("nan")
    out, state, window = outcome(m, spoiled, last)
    kept = r.slots[::2]
    assert same_bits(out[::2], once[0][::2])
    assert same_bits(state[:, kept], once[1][:, kept])
    assert same_bits(window[:, kept], once[2][:, kept])
    for row in (0, 4):
        part = {name: getattr(r, name)[:, row : row + 1] for name in ("x", "a", "b")}
        alone = r.with_clones(**part, slots=r.slots[row : row + 1])
        out, state, _ = outcome(m, alone, last[row : row + 1])
        assert same_bits(out[0], once[0][row])
        assert same_bits(state[:, r.slots[row]], once[1][:, r.slots[row]])


@pytest.mark.parametrize("batch", [1, 3, 8, 33])
@pytest.mark.parametrize("template", ["(3,3,3)", "any:64", "chain:7", spell(grow(100, 8, seed=2))])
def test_solve_beside_factor_changes_no_bit(template: str, batch: int) -> None:
    m = build(template, depth=8, **FULL)
    trees = [grow(64, 8, seed) for seed in range(batch)] if template == "any:64" else None
    r = make_round(m, batch=batch, slots=batch + 1, trees=trees, device="cuda")
    r.slots[2::5] = -1
    last = [m.MODULE.nodes - 1 - row % 3 for row in range(batch)]
    apart = outcome(m, r, last, overlap=False)
    for _ in range(20):
        beside = outcome(m, r, last, overlap=True)
        assert all(same_bits(x, y) for x, y in zip(apart, beside, strict=True))


def test_solve_beside_factor_where_every_row_is_padded() -> None:
    m = build("(3,3,3)", depth=8, **FULL)
    r = make_round(m, batch=8, slots=9, device="cuda")
    r.slots[:] = -1
    out, state, window = outcome(m, r, [0] * 8, overlap=True)
    assert not out.any()
    assert same_bits(state, r.state)
    assert same_bits(window, r.conv_state)


def far_apart(tensor: torch.Tensor, dim: int, pitch: int) -> torch.Tensor:
    """The same values, entries of `dim` this many elements apart in one huge allocation."""
    inner = tensor.movedim(dim, 0)
    held = torch.empty(
        (len(inner) - 1) * pitch + inner[0].numel(), dtype=tensor.dtype, device="cuda"
    )
    strides = [pitch, *torch.empty(inner.shape[1:]).stride()]
    return held.as_strided(inner.shape, strides).copy_(inner).movedim(0, dim)


def test_slots_past_two_to_the_31() -> None:
    m = build("any:40", depth=6, key_heads=1, value_heads=2, d_k=80, d_v=112)
    tree = grow(40, 6, seed=1)
    r = make_round(m, batch=3, slots=2101, trees=[tree] * 3, device="cuda")
    r.slots = torch.tensor([2047, 2048, 2100], dtype=torch.int32, device="cuda")
    r.state = far_apart(r.state[0], 0, 1 << 20)[None]
    r.conv_state = far_apart(r.conv_state[0], 0, 1 << 20)[None]
    before = r.state.clone(), r.conv_state.clone()
    factors = poison(m.allocate(3, 1, "cuda"))
    worst = check_verify(m, r, r.verify(m, factors), factors)
    last = [39, 0, deepest(tree)]
    was = r.with_clones()
    r.commit(m, factors, last)
    report(worst | check_commit(m, was, factors, before, (r.state, r.conv_state), last))


def test_nodes_past_two_to_the_31() -> None:
    m = build("any:40", depth=6, key_heads=1, value_heads=2, d_k=80, d_v=112)
    r = make_round(m, batch=1, trees=[grow(10, 4, seed=1)], device="cuda")
    factors = poison(m.allocate(1, 1, "cuda"))
    want = r.verify(m, factors)
    far = r.with_clones()
    for name in ("x", "a", "b"):
        setattr(far, name, far_apart(getattr(r, name)[0], 1, 1 << 28)[None])
    assert far.x.stride(2) * 9 > 1 << 31
    assert same_bits(far.verify(m, poison(factors)), want)
    out = far_apart(torch.zeros_like(want), 1, 1 << 28)
    with pytest.raises(ValueError, match="out: expected a node stride below"):
        far.verify(m, factors, out=out)


@pytest.mark.parametrize("state_dtype", [DType.FP32, DType.BF16])
def test_4096_rounds_do_not_drift(state_dtype: DType) -> None:
    layout = "replay" if state_dtype is DType.FP32 else "pku"
    m = build("(2,1)", state_dtype=state_dtype, factors=layout, d_k=32, d_v=32)
    report(play_rounds(m, 4096, write=1.0, device="cuda"))


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("layout", ["replay", "pku"])
def test_a_graph_follows_new_contents_bit_for_bit(layout: str) -> None:
    m = build("any:128", depth=12, factors=layout, **SOME)
    rounds = [
        make_round(
            m,
            batch=4,
            layers=2,
            slots=9,
            seed=seed,
            trees=[grow(128, 12, 10 * seed + row) for row in range(4)],
            device="cuda",
        )
        for seed in range(3)
    ]
    for seed, r in enumerate(rounds):
        # rows come and go, and with them the numbers of nodes
        r.slots[seed] = -1
        counts = torch.tensor([128, 1, 50 + seed, 17], device="cuda")
        r.live = torch.arange(128, device="cuda")[None] < counts[:, None]
    static, factors = rounds[0].with_clones(), poison(m.allocate(4, 2, "cuda"))
    outs = torch.empty(2, 4, 128, 4, 128, dtype=static.x.dtype, device="cuda")
    last = torch.zeros(4, dtype=torch.int64, device="cuda")

    def step(r: Round, f: Any, held: torch.Tensor, nodes: torch.Tensor) -> None:
        for layer in range(2):
            r.verify(m, f, layer, out=held[layer])
        m.commit(f, r.state, r.conv_state, r.slots, nodes)

    step(static, factors, outs, last)
    factors.check = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static, factors, outs, last)
    for r, nodes in zip(rounds, ([3, 0, 49, 16], [127, 0, -1, 5], [9, 1, 30, 200]), strict=True):
        for name, value in vars(r).items():
            if isinstance(value, torch.Tensor):
                getattr(static, name).copy_(value)
        last.copy_(torch.tensor(nodes, device="cuda"))
        poison(factors)
        count = allocations()
        graph.replay()
        torch.cuda.synchronize()
        assert allocations() == count
        eager, held = r.with_clones(), torch.empty_like(outs)
        other = poison(m.allocate(4, 2, "cuda"))
        other.check = False
        count = allocations()
        step(eager, other, held, last)
        assert allocations() == count
        assert same_bits(outs, held)
        assert same_bits(static.state, eager.state)
        assert same_bits(static.conv_state, eager.conv_state)

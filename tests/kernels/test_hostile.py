"""Operands that hide nothing: parallel keys, decays that vanish, gates of every size, zeros."""

import math
from functools import partial
from types import ModuleType

import pytest
import torch

from bolegen.ir import DType
from support.rounds import Round, check_commit, make_round, play, split
from support.rounds import build as build_heads

TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
TREE_TEMPLATE = "parents:[-1,0,0,1,1,2,3,3,6]"
LAYOUTS = ["replay", "pku"]
SOME = [  # each mixer in one layout, gdn in both
    ("gdn", "replay"),
    ("gdn", "pku"),
    ("gdn_neg", "replay"),
    ("deltanet", "pku"),
    ("mamba2", "replay"),
    ("mamba2", "pku"),
    ("lightning", "replay"),
]
DECAYING = [case for case in SOME if case[0] in ("gdn", "mamba2", "lightning")]
INF = math.inf
build = partial(build_heads, value_heads=1)


def align_keys(m: ModuleType, r: Round, cosine: float) -> None:
    """Give every key the same direction, up to a part that makes pairs meet at this cosine."""
    keys = split(m, r.x)[1]
    one = torch.randn(keys.shape[-2:], generator=torch.Generator().manual_seed(7))
    keys.copy_(math.sqrt(cosine) * one + math.sqrt(1 - cosine) * keys)


@pytest.mark.parametrize(
    ("mixer", "template", "cosine", "dtype", "layout"),
    [
        ("gdn", "chain:16", 1.0, DType.BF16, "pku"),
        ("gdn", "chain:16", 0.9, DType.FP32, "pku"),
        ("gdn", "chain:32", 0.9, DType.BF16, "replay"),
        ("gdn", "chain:32", 1.0, DType.FP32, "pku"),
        ("gdn", "chain:32", 0.97, DType.FP16, "pku"),
        ("gdn", "chain:48", 0.97, DType.BF16, "pku"),
        ("gdn", "any:33", 0.9, DType.BF16, "pku"),
        ("gdn_neg", "chain:16", 1.0, DType.BF16, "pku"),  # a beta of 2
        ("gdn_neg", "chain:32", 0.97, DType.BF16, "replay"),
        ("deltanet", "chain:16", 1.0, DType.FP32, "pku"),
        ("mamba2", "chain:16", 1.0, DType.BF16, "replay"),
    ],
)
def test_parallel_keys_written_at_full_strength(
    mixer: str, template: str, cosine: float, dtype: DType, layout: str
) -> None:
    depth = None if template != "any:33" else 32
    m = build(template, depth=depth, dtype=dtype, factors=layout, mixer=mixer)
    r = make_round(m, batch=1, trees=[list(range(-1, m.MODULE.nodes - 1))], write=12.0)
    align_keys(m, r, cosine)
    r.A_log.fill_(-20.0)
    play(m, r, [m.MODULE.nodes - 1], convolved=True).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_that_repeat_one_token(layout: str) -> None:
    m = build("chain:16", factors=layout, dtype=DType.FP32)
    r = make_round(m, batch=1, repeat=1.0, write=6.0, log_rate=(-12.0, -6.0))
    play(m, r, [16]).assert_within()


@pytest.mark.parametrize(("mixer", "layout"), DECAYING)
@pytest.mark.parametrize("rate", [0.0, 3.0, 5.0])
def test_decays_that_underflow_along_the_path(rate: float, mixer: str, layout: str) -> None:
    m = build("chain:8", factors=layout, mixer=mixer)
    r = make_round(m, batch=1, log_rate=(rate, rate), step=4.0)
    play(m, r, [8]).assert_within()


@pytest.mark.parametrize(
    ("mixer", "template", "layout"),
    [
        *(("gdn", t, layout) for t in ("chain:8", "chain:20", "any:9") for layout in LAYOUTS),
        ("mamba2", "any:9", "replay"),
        ("lightning", "chain:8", "pku"),
        ("lightning", "any:9", "replay"),
    ],
)
def test_dead_nodes_below_strong_decays(mixer: str, template: str, layout: str) -> None:
    # a dead node has no sum of its own: no ratio may be formed against a live ancestor's
    m = build(template, depth=20, factors=layout, mixer=mixer)
    nodes = m.MODULE.nodes
    trees = [list(range(-1, nodes - 1))]
    r = make_round(m, batch=1, trees=trees, log_rate=(3.0, 3.0), step=4.0)
    r.live = torch.arange(nodes)[None] < 5
    play(m, r, [4]).assert_within()


@pytest.mark.parametrize(("mixer", "layout"), DECAYING[:4])
def test_long_sums_of_log_decays_lose_nothing(mixer: str, layout: str) -> None:
    # the first nodes take the sum to about -400, the rest hardly decay at all
    m = build("chain:16", factors=layout, dtype=DType.FP32, mixer=mixer)
    r = make_round(m, batch=1, log_rate=(1.0, 1.0))
    r.dt_bias.zero_()
    r.a[:, :, :8] = 18.0 + r.a[:, :, :8]
    r.a[:, :, 8:] = -5.0 + 0.5 * r.a[:, :, 8:]
    play(m, r, [16]).assert_within()


def cut(r: Round, nodes: list[int]) -> None:
    """Decay exactly 0 at these nodes: e^-40,000 in any arithmetic; little elsewhere."""
    r.A_log.fill_(6.0)
    r.dt_bias.zero_()
    r.a.fill_(-9.0)
    r.a[:, :, nodes] = 100.0


@pytest.mark.parametrize(
    ("nodes", "mixer", "layout"),
    [
        *(
            (nodes, "gdn", layout)
            for nodes in ([0], [1], [3, 6], [2, 5], list(range(9)))
            for layout in LAYOUTS
        ),
        ([3, 6], "mamba2", "replay"),
        ([2, 5], "mamba2", "pku"),
    ],
    ids=str,
)
def test_a_decay_of_zero_is_a_cut(nodes: list[int], mixer: str, layout: str) -> None:
    m = build(TREE_TEMPLATE, factors=layout, dtype=DType.FP32, mixer=mixer)
    r = make_round(m)
    cut(r, nodes)
    play(m, r, [8, 5]).assert_within()


EXTREMES = [
    (200.0, 1.0),  # exp(A_log) overflows
    (200.0, -19.0),
    (200.0, -210.0),  # and the softplus underflows, so that the decay is neither 0 nor 1
    (88.0, -88.0),
    (60.0, -60.0),
    (60.0, -110.0),
    (60.5, -61.0),
    (-1000.0, 3.0),  # exp(A_log) is 0: no decay at all
    (INF, 1.0),
    (-INF, 1.0),
    (-INF, -40.0),
    (0.0, INF),
    (0.0, -INF),
    (0.0, -300.0),
    (2.0, 20.5),  # the softplus is linear from here
]


@pytest.mark.parametrize(
    ("mixer", "layout", "A_log", "a"),
    [
        *(("gdn", layout, *case) for layout in LAYOUTS for case in EXTREMES),
        *(("kda", "replay", *case) for case in EXTREMES),
        # an infinite write gate is no gate
        *(("mamba2", "replay", *case) for case in EXTREMES if case[1] < INF),
        *(("lightning", "pku", *case) for case in EXTREMES[2:8:2]),
        ("lightning", "replay", INF, 0.0),
        ("lightning", "replay", -INF, 0.0),
    ],
)
def test_extreme_gate_parameters(mixer: str, layout: str, A_log: float, a: float) -> None:
    m = build("(2,2)", factors=layout, dtype=DType.FP32, mixer=mixer)
    r = make_round(m, batch=1)
    r.A_log.fill_(A_log)
    r.dt_bias.zero_()
    r.a[:, :, 1:] = a
    play(m, r, [3]).assert_within()


@pytest.mark.parametrize(("mixer", "layout"), [c for c in SOME if c not in DECAYING[2:]])
def test_write_gates_from_1e_12_to_1_and_zero(mixer: str, layout: str) -> None:
    m = build("chain:16", factors=layout, dtype=DType.FP32, mixer=mixer)
    r = make_round(m, batch=1, repeat=0.9)
    gate = 10.0 ** torch.linspace(-12, -1e-6, 17)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    r.b[:] = torch.log(gate / (1 - gate))[order, None]
    r.b[:, :, 5], r.b[:, :, 9] = -INF, INF
    play(m, r, [16]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decays_and_gates_of_every_size_at_once(layout: str) -> None:
    m = build("(2,2,2)", factors=layout)
    r = make_round(m, repeat=0.9)
    nodes = m.MODULE.nodes
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(2))
    decay = 10.0 ** torch.linspace(-12, -1e-7, nodes)
    # softplus(a) = -log decay at rate 1
    r.A_log.zero_()
    r.dt_bias.zero_()
    r.a[:] = torch.log(torch.expm1(-torch.log(decay)))[order, None].to(r.a.dtype)
    r.b[:] = torch.linspace(-27, 15, nodes)[order.flip(0), None].to(r.b.dtype)
    play(m, r, [14, 7]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", [False, True])
def test_decays_of_exactly_one(half: bool, layout: str) -> None:
    m = build("(2,2)", factors=layout)
    r = make_round(m)
    if half:
        r.a[:, :, ::2] = -300.0
    else:
        r.A_log.fill_(-1000.0)
    play(m, r, [5, 6]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_siblings_with_opposite_gates_do_not_leak(layout: str) -> None:
    m = build("(2,2)", factors=layout, dtype=DType.FP32)
    r = make_round(m)
    cut(r, [2, 3, 6])
    r.b[:, :, 1::2], r.b[:, :, 2::2] = 14.0, -27.0
    play(m, r, [4, 5]).assert_within()


@pytest.mark.parametrize(
    ("mixer", "layout", "dtype"),
    [
        *(("gdn", layout, dtype) for layout in LAYOUTS for dtype in (DType.FP16, DType.BF16)),
        # without a norm q and k enter at their own size; 50^3 is more than fp16 holds
        ("mamba2", "pku", DType.BF16),
        ("lightning", "replay", DType.BF16),
    ],
)
@pytest.mark.parametrize("size", [0.0, 1e-4, 50.0])
def test_rows_of_every_size(size: float, mixer: str, layout: str, dtype: DType) -> None:
    m = build("(2,2)", factors=layout, dtype=dtype, mixer=mixer)
    r = make_round(m)
    r.x.mul_(size)
    r.conv_state.mul_(size)
    play(m, r, [5, 6]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])
def test_states_of_every_size(size: float, layout: str) -> None:
    m = build("(2,2)", factors=layout)
    r = make_round(m)
    r.state.mul_(size)
    play(m, r, [5, 6]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biased_rows_and_gates_in_float32_beside_half_rows(layout: str) -> None:
    # gates and their parameters may come in float32 or in the activations' dtype
    m = build("(2,2)", factors=layout, dtype=DType.FP16)
    r = make_round(m, bias=True)
    r.a, r.b = torch.randn(r.a.shape), torch.randn(r.b.shape)
    play(m, r, [5, 6]).assert_within()
    r.A_log, r.dt_bias, r.a = r.A_log.half(), r.dt_bias.half(), r.a.half()
    play(m, r, [5, 6]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32])
def test_committed_states_of_deep_paths_with_parallel_keys(dtype: DType, layout: str) -> None:
    # deep below a cut, a tracked ancestor anywhere, a state over several pieces of d_k
    m = build("chain:32", factors=layout, dtype=dtype, d_k=48)
    r = make_round(m, batch=1, repeat=1.0, write=12.0, log_rate=(-14.0, -9.0))
    align_keys(m, r, 0.97)
    r.A_log.fill_(6.0)
    r.dt_bias.zero_()
    r.a.fill_(-14.0)
    r.a[:, :, 7] = 100.0
    r.slots = torch.tensor([2])
    factors, was = m.allocate(1, 1, "cpu"), r.with_clones()
    r.verify_qkv(m, factors)
    for last, node in ((32, 7), (32, 15), (16, 16), (31, 0)):
        one = was.with_clones()
        track = {"track_slots": torch.tensor([0]), "track_node": torch.tensor([node])}
        one.commit(m, factors, [last], **track)
        pools = (was.state, was.conv_state), (one.state, one.conv_state)
        check_commit(m, r, factors, *pools, [last], tracks=[(0, node)]).assert_within()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("decay", "nodes"),
    [(1e-12, [0, 8]), (1e-7, [2, 3, 4]), (1e-3, range(9)), (0.3, range(9))],
    ids=str,
)
def test_decays_of_a_path_that_writes_nothing(decay: float, nodes: list[int], layout: str) -> None:
    # what is left of the state has no error but the decays' own
    m = build("chain:8", dtype=DType.FP32, factors=layout)
    r = make_round(m, batch=1)
    r.b.fill_(-INF)
    r.A_log.zero_()
    r.dt_bias.zero_()
    rate = -math.log(decay)
    r.a.fill_(-40.0)
    r.a[:, :, list(nodes)] = rate + math.log(-math.expm1(-rate))  # whose softplus is rate
    play(m, r, [8]).assert_within()

"""A row's bits depend on that row alone: not on mates, padding, dead nodes, memory or strides."""

from types import ModuleType
from typing import Any

import pytest
import torch

from support.rounds import Round, build, check_verify, make_round, play, poison, same_bits, split

TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
KINDS: dict[str, dict[str, Any]] = {
    "static-replay": {"template": "parents:[-1,0,0,1,1,2,3,3,6]"},
    "static-pku": {"template": "parents:[-1,0,0,1,1,2,3,3,6]", "factors": "pku"},
    "runtime-replay": {"template": "any:12", "depth": 5},
    "runtime-pku": {"template": "any:12", "depth": 5, "factors": "pku"},
}
KINDS |= {
    "mamba2": KINDS["static-replay"] | {"mixer": "mamba2", "value_heads": 1},
    "lightning": KINDS["runtime-pku"] | {"mixer": "lightning", "value_heads": 1},
}
NAN = float("nan")
every_kind = pytest.mark.parametrize("m", KINDS, indirect=True)
# what stands in a row, and whether it is copied, differs most in these
row_kinds = pytest.mark.parametrize(
    "m", ["static-pku", "runtime-replay", "mamba2", "lightning"], indirect=True
)


@pytest.fixture(params=["static-pku", "runtime-replay", "mamba2"], scope="module")
def m(request: pytest.FixtureRequest) -> ModuleType:
    return build(**KINDS[request.param])


def nine_nodes(m: ModuleType, batch: int = 2, **options: Any) -> Round:
    return make_round(m, batch=batch, trees=[TREE] * batch, **options)


def outcome(
    m: ModuleType, r: Round, last: list[int], *, wild: bool = True, spare: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, states and windows of one round, on memory with room for `spare` more rows."""
    r = r.with_clones()
    factors = m.allocate(len(r.slots) + spare, 1, "cpu")
    if wild:
        poison(factors)
    out = r.verify(m, factors)
    r.commit(m, factors, last)
    return out, r.state, r.conv_state


@pytest.fixture(scope="module")
def clean(m: ModuleType) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the round of nine nodes gives as it stands."""
    return outcome(m, nine_nodes(m), [8, 5])


def assert_same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert same_bits(a, b)


@every_kind
def test_runs_repeat_on_any_memory(m: ModuleType, clean: tuple[torch.Tensor, ...]) -> None:
    r = nine_nodes(m)
    assert_same(clean, outcome(m, r, [8, 5], spare=3))
    factors = m.allocate(2, 1, "cpu")
    for tensor in vars(factors).values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    assert_same(clean[:1], (r.verify(m, factors),))


def test_alone_or_among_mates(m: ModuleType) -> None:
    r = nine_nodes(m, batch=3, slots=5)
    out, state, window = outcome(m, r, [4, 8, 7])
    for row, last in enumerate([4, 8, 7]):
        slot = int(r.slots[row])
        part = {name: getattr(r, name)[:, row : row + 1] for name in ("x", "a", "b")}
        parents = None if r.parents is None else r.parents[row : row + 1]
        alone = r.with_clones(**part, slots=r.slots[row : row + 1], parents=parents)
        got = outcome(m, alone, [last])
        assert same_bits(got[0][0], out[row])
        assert same_bits(got[1][0, slot], state[0, slot])
        assert same_bits(got[2][0, slot], window[0, slot])


@every_kind
def test_nan_in_dead_nodes_changes_no_bit(m: ModuleType) -> None:
    r = nine_nodes(m)
    # the first node of a dead branch, leaves, and all but the root
    r.live = torch.ones(2, 9, dtype=torch.bool)
    r.live[0, [2, 5, 8]] = False
    r.live[1, 1:] = False
    clean = outcome(m, r, [6, 0])
    for tensor in (r.x, r.a, r.b):
        tensor[:, ~r.live] = NAN
    assert_same(clean, outcome(m, r, [6, 0]))
    play(m, r, [6, 0]).assert_within()


@every_kind
def test_nan_in_padded_rows_and_other_slots_changes_no_bit(m: ModuleType) -> None:
    r = nine_nodes(m, batch=3, slots=6)
    r.slots = torch.tensor([-1, 0, 5])
    clean = outcome(m, r, [8, 8, 3])
    assert torch.count_nonzero(clean[0][0]) == 0
    for tensor in (r.x, r.a, r.b):
        tensor[:, 0] = NAN
    if r.parents is not None:
        r.parents[0] = -77
    others = [1, 2, 3, 4]
    r.state[:, others] = NAN
    r.conv_state[:, others] = NAN
    out, state, window = outcome(m, r, [8, 8, 3])
    assert same_bits(out, clean[0])
    for pool, want, given in ((state, clean[1], r.state), (window, clean[2], r.conv_state)):
        assert same_bits(pool[:, [0, 5]], want[:, [0, 5]])
        assert same_bits(pool[:, others], given[:, others])
    play(m, r, [8, 8, 3]).assert_within()


@pytest.mark.parametrize("slots", [[-1, -1], [-7, 3], [3, -1]])
def test_padded_rows_anywhere(m: ModuleType, slots: list[int]) -> None:
    r = nine_nodes(m)
    r.slots = torch.tensor(slots)
    factors = poison(m.allocate(2, 1, "cpu"))
    before = r.with_clones()
    out = r.verify(m, factors)
    if max(slots) < 0:
        assert torch.count_nonzero(out) == 0
        r.commit(m, factors, [8, 8])
        assert same_bits(r.state, before.state)
        assert same_bits(r.conv_state, before.conv_state)
    else:
        play(m, r, [8, 8]).assert_within()


def test_padded_rows_replay_with_the_weights_of_this_round() -> None:
    # row 0 is padded, so nothing that it alone would have done may be missing
    m = build("(2,2)", factors="replay")
    r = make_round(m)
    r.slots[0] = -1
    play(m, r, [6, 6]).assert_within()


def test_siblings_are_never_seen(m: ModuleType) -> None:
    r = nine_nodes(m, batch=1)
    clean = outcome(m, r, [6])
    path = [0, 1, 3, 6, 8]
    aside = [n for n in range(9) if n not in path]
    other = r.with_clones()
    for tensor in (other.x, other.a, other.b):
        tensor[:, :, aside] = 2 - 3 * tensor[:, :, aside]
    changed = outcome(m, other, [6])
    assert same_bits(changed[0][:, path], clean[0][:, path])
    assert not torch.equal(changed[0][:, aside], clean[0][:, aside])
    assert_same(changed[1:], clean[1:])


def wide(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values as a column view of a wider tensor that holds NaN beside them."""
    held = torch.full((*tensor.shape[:-1], tensor.shape[-1] + gap), NAN, dtype=tensor.dtype)
    view = held[..., gap // 2 : gap // 2 + tensor.shape[-1]]
    return view.copy_(tensor)


def apart(tensor: torch.Tensor, dim: int, pitch: int) -> torch.Tensor:
    """The same values with entries of `dim` further apart, NaN in between."""
    inner = tensor.movedim(dim, 0)
    held = torch.full((len(inner), pitch), NAN, dtype=tensor.dtype)
    strides = [pitch, *torch.empty(inner.shape[1:]).stride()]
    return held.as_strided(inner.shape, strides).copy_(inner).movedim(0, dim)


@row_kinds
def test_views_of_wider_tensors(m: ModuleType, clean: tuple[torch.Tensor, ...]) -> None:
    r = nine_nodes(m)
    pair = torch.stack([r.a, r.b], dim=-1)
    views = r.with_clones()
    views.x, views.a, views.b = wide(r.x, 13), pair[..., 0], pair[..., 1]
    if r.parents is not None:
        views.parents = torch.full((2, 40), 99)[:, 5:23:2].copy_(r.parents)
    views.live = torch.zeros(9, 2, dtype=torch.bool).t().fill_(True)
    assert views.a.stride(-1) == 2
    held = torch.full((2, 9, 3, *clean[0].shape[2:]), 7.0, dtype=r.x.dtype)
    factors = poison(m.allocate(2, 1, "cpu"))
    out = views.verify(m, factors, out=held[:, :, 1])
    assert out.data_ptr() == held[:, :, 1].data_ptr()
    assert same_bits(held[:, :, 1], clean[0])
    assert torch.all(held[:, :, ::2] == 7.0)
    views.commit(m, factors, [8, 5])
    assert_same((views.state, views.conv_state), clean[1:])


def test_node_major_activations(m: ModuleType, clean: tuple[torch.Tensor, ...]) -> None:
    r = nine_nodes(m)
    turned = r.with_clones()
    for name in ("x", "a", "b"):
        turned_tensor = getattr(r, name).transpose(1, 2).contiguous().transpose(1, 2)
        setattr(turned, name, turned_tensor)
    turned.a = r.a.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    factors = poison(m.allocate(2, 1, "cpu"))
    out = torch.empty(9, 2, *clean[0].shape[2:], dtype=r.x.dtype).transpose(0, 1)
    turned.verify(m, factors, out=out)
    assert same_bits(out, clean[0])


@row_kinds
def test_convolved_views_of_one_wider_tensor(m: ModuleType) -> None:
    r = nine_nodes(m)
    factors = poison(m.allocate(2, 1, "cpu"))
    clean = r.verify_qkv(m, factors)
    q, k, v = split(m, wide(r.x[0], 26))
    v = torch.stack([v, v * 0 + NAN], dim=3)[:, :, :, 0]
    options = r.options(m, 0)
    out = m.verify_qkv(q, k, v, *r.gates(m, 0), r.state[0], r.slots, poison(factors), **options)
    assert same_bits(out, clean)
    check_verify(m, r, out, factors).assert_within()


def test_pools_with_any_slot_and_layer_pitch(
    m: ModuleType, clean: tuple[torch.Tensor, ...]
) -> None:
    r = nine_nodes(m)
    spread = r.with_clones()
    state, window = r.state[0], r.conv_state[0]
    spread.state = apart(state, 0, state[0].numel() + 77)[None]
    spread.conv_state = apart(window, 0, window[0].numel() + 5)[None]
    assert not spread.state[0].is_contiguous()
    factors = poison(m.allocate(2, 1, "cpu"))
    assert same_bits(spread.verify(m, factors), clean[0])
    spread.commit(m, factors, [8, 5])
    assert_same((spread.state, spread.conv_state), clean[1:])


def test_what_the_skip_reads_is_its_own_head() -> None:
    m = build("(2)", mixer="mamba2")
    r = make_round(m, batch=1)
    clean = outcome(m, r, [2])
    assert r.D is not None
    out, *pools = outcome(m, r.with_clones(D=r.D + torch.tensor([0, 1])), [2])
    assert same_bits(out[:, :, 0], clean[0][:, :, 0])
    assert not torch.equal(out[:, :, 1], clean[0][:, :, 1])
    assert_same(tuple(pools), clean[1:])
    # in the activations' dtype as well, and left out where it is zero
    play(m, r.with_clones(D=r.D.bfloat16()), [2]).assert_within()
    without, zero = (outcome(m, r.with_clones(D=D), [2]) for D in (None, 0 * r.D))
    assert_same(without, zero)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_either_width(dtype: torch.dtype) -> None:
    m = build(**KINDS["runtime-replay"])
    r = nine_nodes(m)
    clean = outcome(m, r, [8, 5])
    r.slots = r.slots.to(dtype)
    if r.parents is not None:
        r.parents = r.parents.to(dtype)
    factors = poison(m.allocate(2, 1, "cpu"))
    assert same_bits(r.verify(m, factors), clean[0])
    last = torch.tensor([8, 5], dtype=dtype)
    none = torch.tensor([-1, -1], dtype=dtype)
    m.commit(factors, r.state, r.conv_state, r.slots, last, track_slots=none, track_node=none)
    assert_same((r.state, r.conv_state), clean[1:])

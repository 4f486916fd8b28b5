"""What a mixer does not have is None, what only it has is checked, and MODULE says which it is."""

from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen.ir import MIXERS, Decay, Mixer
from support.rounds import Round, build, make_round, same_bits, split

NAMES = ("a", "b", "A_log", "dt_bias")
TREE = [-1, 0, 0, 1]
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())


def made(mixer: Mixer, tree: list[int] = TREE) -> tuple[ModuleType, Round]:
    m = build("any:6", depth=3, value_heads=2, mixer=mixer)
    return m, make_round(m, batch=1, trees=[tree], bias=mixer.convolved)


def arguments(m: ModuleType, r: Round, call: str) -> dict[str, Any]:
    """Every argument of a verify that this module takes, None for the others."""
    mixer = MIXERS[m.MODULE.mixer]
    pool = {"state": r.state[0], "slots": r.slots} | r.options(m, 0)
    known = dict(zip(NAMES, r.gates(m, 0), strict=True)) | pool
    if call == "verify_qkv":
        return known | dict(zip("qkv", split(m, r.x[0]), strict=True))
    names = ("conv_weight", "conv_bias", "conv_state")
    window = {name: getattr(r, name)[0] if mixer.convolved else None for name in names}
    return known | window | {"x": r.x[0]}


def unread(m: ModuleType, call: str) -> set[str]:
    mixer = MIXERS[m.MODULE.mixer]
    others = set(NAMES) - set(mixer.arguments)
    if call == "verify" and not mixer.convolved:
        others |= {"conv_weight", "conv_bias", "conv_state"}
    return others


def held(factors: Any) -> list[torch.Tensor]:
    return [t.clone() for t in vars(factors).values() if isinstance(t, torch.Tensor)]


@every_mixer
@pytest.mark.parametrize("call", ["verify", "verify_qkv"])
def test_only_what_the_mixer_reads_is_taken(call: str, mixer: Mixer) -> None:
    m, r = made(mixer)
    known, factors = arguments(m, r, call), m.allocate(1, 1, "cpu")
    assert {name for name, value in known.items() if value is None} - {"live"} == unread(m, call)
    before = held(factors)
    for name in unread(m, call):
        with pytest.raises(ValueError, match=rf"^{name}: expected None, {mixer.name} has no such"):
            getattr(m, call)(factors=factors, **known | {name: torch.zeros(1, 4, 2)})
    for name in {"x", "q", *mixer.arguments} & known.keys():
        for wrong in (None, known[name][..., :-1], known[name].to(torch.float64)):
            with pytest.raises(ValueError, match=rf"^{name}: expected "):
                getattr(m, call)(factors=factors, **known | {name: wrong})
    assert all(same_bits(x, y) for x, y in zip(before, held(factors), strict=True))
    out = getattr(m, call)(factors=factors, **known)
    assert out.shape == (1, 4, 2, 16)


@pytest.mark.parametrize("call", ["verify", "verify_qkv"])
def test_the_skip_is_one_number_a_head(call: str) -> None:
    m, r = made(MIXERS["mamba2"])
    known, factors = arguments(m, r, call), m.allocate(1, 1, "cpu")
    D = known["D"]
    spoiled = {
        r"expected shape \(2,\), got \(1,\)": D[:1],
        r"expected shape \(2,\), got \(2, 1\)": D[:, None],
        r"expected shape \(2,\), got \(\)": D[0],
        r"expected torch.float32 or torch.bfloat16, got torch.float16": D.half(),
        r"expected strides \(1,\), got \(2,\)": torch.stack([D, D], 1)[:, 0],
        r"expected device cpu, got meta": D.to("meta"),
        r"expected a tensor, got list": D.tolist(),
    }
    for said, value in spoiled.items():
        with pytest.raises(ValueError, match=f"^D: {said}"):
            getattr(m, call)(factors=factors, **known | {"D": value})
    # without one, o has no D v
    getattr(m, call)(factors=factors, **known | {"D": None})


@every_mixer
def test_mixers_without_a_skip_know_no_such_argument(mixer: Mixer) -> None:
    m, r = made(mixer)
    if mixer.skip:
        assert "D" in arguments(m, r, "verify")
        return
    with pytest.raises(TypeError, match="unexpected keyword argument 'D'"):
        m.verify(factors=m.allocate(1, 1, "cpu"), **arguments(m, r, "verify"), D=None)


@every_mixer
def test_commit_takes_a_window_where_there_is_one(mixer: Mixer) -> None:
    m, r = made(mixer)
    factors = m.allocate(1, 1, "cpu")
    r.verify(m, factors)
    before = r.with_clones()
    wrong = None if mixer.convolved else torch.zeros(1, 4, m.MODULE.dims[0], 3)
    with pytest.raises(ValueError, match=r"^conv_state: expected None"):
        m.commit(factors, r.state, wrong, r.slots, torch.tensor([2]))
    assert same_bits(r.state, before.state)
    r.commit(m, factors, [2])
    assert not torch.equal(r.state, before.state)


@every_mixer
def test_a_wrong_number_of_nodes_is_blamed_on_what_was_given(mixer: Mixer) -> None:
    m, r = made(mixer, [-1, *[0] * 6])
    factors = m.allocate(1, 1, "cpu")
    for call, name in (("verify", "x"), ("verify_qkv", "q")):
        with pytest.raises(ValueError, match=rf"^{name}: expected 1 to 6 nodes, got 7"):
            getattr(m, call)(factors=factors, **arguments(m, r, call))


@every_mixer
@pytest.mark.parametrize("template", ["(2,2)", "any:9"])
def test_the_module_says_what_it_is(template: str, mixer: Mixer) -> None:
    m = build(template, depth=4, mixer=mixer, key_heads=1, value_heads=8, d_k=24, d_v=40)
    known = m.MODULE
    assert known.name.startswith(f"{mixer.name}_")
    assert (known.mixer, known.heads, known.dims) == (mixer.name, (1, 8), (24, 40))
    assert known.conv == (4 if mixer.convolved else 1)
    assert known.depth == 4
    assert known.steps == ((2 if known.parents else 4) if mixer.delta else 0)
    assert known.digest in (m.__doc__ or "")
    each = " a key channel" if mixer.decay is Decay.CHANNEL else ""
    assert f"g = {mixer.log_decay}{each}; beta = {mixer.write_gate}\n" in (m.__doc__ or "")

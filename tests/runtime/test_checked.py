"""Checked mode passes what is right, and names what is not: planted faults, one at a time."""

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen_runtime import CheckedError, CheckedModule, GraphPool, LayerWeights, Settings, load
from bolegen_runtime.contract import Finding
from support.rounds import Round, make_round, split

LAYERS = 2
SMALL: dict[str, Any] = {"heads": (1, 2), "dims": (16, 16)}
TREES = [[-1, 0, 1, 1, 3], [-1, 0, 0, 2, 2], [-1, 0, 1, 2, 3]]
Fault = Callable[..., None]


@cache
def module(template: str = "(2,1)", **options: Any) -> ModuleType:
    return load(template, **{**SMALL, **options}, settings=Settings())


class Faulty(ModuleType):
    """A module whose verify or commit does something wrong afterwards, or before."""

    def __init__(self, m: ModuleType, **faults: Fault) -> None:
        super().__init__(m.__name__)
        self.m = m

        @wraps(m.verify)
        def verify(*args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = m.verify(*args, **kwargs)
            if "verify" in faults and kwargs["layer"] == LAYERS - 1:
                faults["verify"](out, args[6], args[7], args[9])
            return out

        @wraps(m.commit)
        def commit(*args: Any) -> None:
            if "before" in faults:
                faults["before"](args[0], *args[3:])
            m.commit(*args)
            if "commit" in faults:
                faults["commit"](*args[1:3])

        self.verify, self.commit = verify, commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.m, name)


def play(
    m: ModuleType,
    r: Round,
    last: tuple[int, ...] = (4, 2, -1),
    between: Callable[[Round, Any], object] | None = None,
) -> Any:
    """A round of all layers; the factors, after commit."""
    factors = m.allocate(len(r.slots), LAYERS, "cpu")
    for layer in range(LAYERS):
        r.verify(m, factors, layer)
    if between:
        between(r, factors)
    m.commit(factors, r.state, r.conv_state, r.slots, torch.tensor(last[: len(r.slots)]))
    return factors


def draw(**options: Any) -> Round:
    made = {"batch": 3, "layers": LAYERS, "slots": 5, **options}
    m = made.pop("module", module())
    r = make_round(m, **made)
    r.slots = torch.tensor([3, 0, 2])
    return r


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"factors": "pku"},
        {"dtype": "fp32", "conv": 2},
        {"dtype": "fp16", "state_dtype": "bf16"},
        {"template": "any:6", "depth": 4},
    ],
    ids=str,
)
def test_a_right_round_passes_and_is_bit_equal(options: dict[str, Any]) -> None:
    m = module(**options)
    trees = {"trees": TREES, "nodes": 5} if m.MODULE.parents is None else {}
    r = draw(module=m, bias=True, **trees)
    r.slots[1] = -1
    r.live = torch.tensor([[True, True, False, False, False]] + [[True] * 5] * 2)
    plain = r.with_clones()
    checked = CheckedModule(m)
    factors, bare = checked.allocate(3, LAYERS, "cpu"), m.allocate(3, LAYERS, "cpu")
    for layer in range(LAYERS):
        out = r.verify(checked, factors, layer)
        assert torch.equal(out, plain.verify(m, bare, layer))
    tracks = {"track_slots": torch.tensor([-1, -1, 4]), "track_node": torch.tensor([0, 0, 1])}
    last = torch.tensor([1, 3, 3]) if m.MODULE.parents is None else torch.tensor([1, 3, 4])
    tracks["track_node"][2] = TREES[2][3] if m.MODULE.parents is None else m.MODULE.parents[4]
    checked.commit(factors, r.state, r.conv_state, r.slots, last, **tracks)
    m.commit(bare, plain.state, plain.conv_state, plain.slots, last, **tracks)
    assert torch.equal(r.state, plain.state)
    assert torch.equal(r.conv_state, plain.conv_state)
    # the tracked slot was written: the check had something to compare
    assert not torch.equal(r.state[:, 4], draw(module=m, bias=True, **trees).state[:, 4])


def test_a_convolution_of_the_engines_own_is_checked_too() -> None:
    m, r = CheckedModule(module()), draw()
    factors = m.allocate(3, LAYERS, "cpu")
    for layer in range(LAYERS):
        q, k, v = split(m, r.x[layer])
        gates = (r.a[layer], r.b[layer], r.A_log[layer], r.dt_bias[layer])
        m.verify_qkv(q, k, v, *gates, r.state[layer], r.slots, factors, layer=layer)
    m.commit(factors, r.state, None, r.slots, torch.tensor([4, 0, -1]))


def flip_a_sign(out: torch.Tensor, *_: Any) -> None:
    out[1, 3, 1] *= -1


def fill(out: torch.Tensor, *_: Any) -> None:
    out[0, 2, 0, 5] = float("nan")


def round_twice(out: torch.Tensor, *_: Any) -> None:
    out *= 1.01


def write_a_dead_node(out: torch.Tensor, *_: Any) -> None:
    out[0, 4, 0, 0] = 1.0


def write_the_pool(out: torch.Tensor, state: torch.Tensor, *_: Any) -> None:
    state[4, 0, 0, 0] += 1.0


def shift_rows(out: torch.Tensor, state: Any, windows: Any, factors: Any) -> None:
    rows = factors.convolved_rows(1)
    rows[1, 2] = rows[1, 1]


VERIFY: dict[str, tuple[Fault, str]] = {
    "a sign": (flip_a_sign, r"out: layer 1, request 1 \(slot 0\), head 1, node 3: error .* over"),
    "NaN": (fill, r"out: layer 1, request 0 \(slot 3\), head 0, node 2: error nan over limit"),
    "scale": (round_twice, r"out: layer 1, .*; \d more over their limits"),
    "a dead node": (write_a_dead_node, r"out: layer 1, request 0 \(slot 3\), node 4: error inf"),
    "the pool": (write_the_pool, "state: layer 1, slot 4 has changed, and nothing was to be"),
    "a row": (shift_rows, r"rows: layer 1, request 1 \(slot 0\), node 2"),
}


@pytest.mark.parametrize("what", VERIFY)
def test_a_wrong_verify_is_named(what: str) -> None:
    fault, said = VERIFY[what]
    r = draw()
    r.live = torch.tensor([[True, True, True, True, False]] * 3)
    m = CheckedModule(Faulty(module(), verify=fault))
    with pytest.raises(CheckedError, match=said):
        play(m, r)


def shift_a_window(state: torch.Tensor, windows: torch.Tensor) -> None:
    windows[1, 3] = windows[1, 3].roll(1, dims=1)


def spoil_a_state(state: torch.Tensor, windows: torch.Tensor) -> None:
    state[0, 0, 1] *= 1.001


def write_another(state: torch.Tensor, windows: torch.Tensor) -> None:
    windows[0, 2] += 1


COMMIT: dict[str, tuple[Fault, str]] = {
    "a window": (shift_a_window, r"window: layer 1, request 0 \(slot 3\): error"),
    "a state": (spoil_a_state, r"state: layer 0, request 1 \(slot 0\), head 1: error"),
    "another slot": (write_another, "conv_state: layer 0, slot 2 has changed"),
}


@pytest.mark.parametrize("what", COMMIT)
def test_a_wrong_commit_is_named(what: str) -> None:
    fault, said = COMMIT[what]
    with pytest.raises(CheckedError, match=said):
        play(CheckedModule(Faulty(module(), commit=fault)), draw())


def test_a_state_in_the_wrong_slot_is_named() -> None:
    def swap(factors: Any, slots: torch.Tensor, last: torch.Tensor) -> None:
        slots[0] = 1

    with pytest.raises(CheckedError, match="layer 0, slot 1 has changed"):
        play(CheckedModule(Faulty(module(), before=swap)), draw())
    m = CheckedModule(module())
    with pytest.raises(CheckedError, match="request 0 was verified from slot 3 and is committed"):
        play(m, draw(), between=lambda r, _: r.slots[:1].fill_(1))


def test_stale_parents_are_found_by_what_they_commit() -> None:
    def go_stale(factors: Any, *_: Any) -> None:
        factors.parents[0, :5] = torch.tensor([-1, 0, 0, 0, 0])

    m = module("any:6", depth=4)
    r = draw(module=m, trees=TREES, nodes=5)
    with pytest.raises(CheckedError, match=r"(state|window): layer \d, request 0 \(slot 3\)"):
        play(CheckedModule(Faulty(m, before=go_stale)), r)


def test_corrupted_factors_are_found_by_what_they_commit() -> None:
    def corrupt(factors: Any, *_: Any) -> None:
        factors.gates[1, 0] = 0.5

    with pytest.raises(CheckedError, match="state: layer 1, request 0"):
        play(CheckedModule(Faulty(module(), before=corrupt)), draw())


def test_a_state_that_changes_before_it_is_committed_is_named() -> None:
    def touch(r: Round, _: Any) -> None:
        r.state[1, 3] += 1

    with pytest.raises(CheckedError, match="layer 1, request 0: slot 3 has changed between"):
        play(CheckedModule(module()), draw(), between=touch)


def test_a_commit_needs_a_round_that_is_whole_and_its_own() -> None:
    m, r = CheckedModule(module()), draw()
    factors = play(m, r)
    last = torch.tensor([0, 0, 0])
    with pytest.raises(
        CheckedError, match="layer 0 was not; verify every layer, then commit once"
    ):
        m.commit(factors, r.state, r.conv_state, r.slots, last)
    r.verify(m, factors, 0)
    with pytest.raises(CheckedError, match="layer 1 was not"):
        m.commit(factors, r.state, r.conv_state, r.slots, last)
    r.verify(m, factors, 1)
    with pytest.raises(ValueError, match="last_node"):
        m.commit(factors, r.state, r.conv_state, r.slots, last.float())
    with pytest.raises(ValueError, match=r"state: expected torch\.float32"):
        m.commit(factors, r.state.double(), r.conv_state, r.slots, last)
    with pytest.raises(CheckedError, match="expected 3 rows as verified, got 2"):
        m.commit(factors, r.state, r.conv_state, r.slots[:2], last[:2])
    m.commit(factors, r.state, r.conv_state, r.slots, last)
    with pytest.raises(ValueError, match=r"state: expected shape"):
        r.with_clones(state=r.state[..., None, None]).verify(m, factors, 0)


def test_what_is_kept_of_a_round_goes_with_its_factors() -> None:
    m, r = CheckedModule(module()), draw()
    factors = m.allocate(3, LAYERS, "cpu")
    r.verify(m, factors, 0)
    assert len(m._rounds) == 1
    del factors
    assert not m._rounds


def test_load_gives_a_checked_module_when_told_to() -> None:
    plain = module()
    checked = load("(2,1)", **SMALL, settings=Settings(checked=True))
    assert isinstance(checked, CheckedModule)
    assert checked.MODULE is plain.MODULE
    assert load("(2,1)", **SMALL, settings=Settings(checked=True)) is checked
    assert load("(2,1)", **SMALL, settings=Settings()) is plain


def test_a_pool_of_graphs_warms_up_checked() -> None:
    m, r = CheckedModule(module()), draw()
    weights = [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)]
    GraphPool(m, weights, r.state, r.conv_state, batches=(3,)).find_graph(3).prewarm()


@pytest.mark.parametrize(
    ("option", "got"),
    [({"contract": "tf32"}, "gdn, tf32, split"), ({"readout": "bf16"}, "gdn, fp32, bf16")],
    ids=str,
)
def test_a_module_with_bounds_of_its_own_is_refused(option: dict[str, str], got: str) -> None:
    with pytest.raises(ValueError, match=f"contract fp32 and readout split, got {got}"):
        CheckedModule(module(**option))


def test_a_limit_of_zero_is_met_by_zero_alone() -> None:
    assert Finding("out", 0, 0, 0, 0.0, 0.0).ratio == 0
    assert Finding("out", 0, 0, 0, 1e-30, 0.0).ratio == float("inf")
    assert Finding("out", 0, 0, 0, float("nan"), 1.0).ratio == float("inf")

"""Mixers in the comparison: every one is right and judged, and so are the peer's verifiers."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from benchmarks import contest
from benchmarks.cases import Case, list_mixers
from benchmarks.operands import Operands, draw_operands
from benchmarks.peers.fetch import FOLDER
from benchmarks.peers.mixers import SERIAL
from benchmarks.systems import System
from benchmarks.timing import WrongResultError, judge
from benchmarks.traffic import floor_bytes
from bolegen.ir import MIXERS

OTHERS = [name for name in MIXERS if name != "gdn"]
NODES = 12


def draw(mixer: str, tree: str = f"random{NODES}d4") -> Operands:
    return draw_operands(Case("mixer", f"tiny-{mixer}", tree, 2), 2, "cpu")


def play(system: System) -> dict[str, float]:
    system.prepare()
    outputs = [system.run(layer) for layer in range(2)]
    found = judge(system, 1, outputs[1])
    outputs[1][1, 3] += 0.05 * outputs[1][1].abs().max()
    with pytest.raises(WrongResultError, match=rf"{system.name}.*'o': [1-9]"):
        judge(system, 1, outputs[1])
    return found


def test_every_mixer_is_compared_and_both_peers_at_64_nodes_and_16_requests() -> None:
    cases = list(list_mixers())
    assert {case.shape.mixer.name for case in cases} == set(OTHERS)
    for model in ("Kimi-Linear", "Nemotron-H-8B"):
        for tree in ("eagle64", "any:eagle64"):
            assert f"mixer/{model}/{tree}/B16/fp32" in {case.key for case in cases}


def test_peers_are_built_ahead_where_there_are_any() -> None:
    tasks = contest.list_tasks(list_mixers())
    alone = {case for cases, mine in tasks if not mine for case in cases}
    assert {case.shape.mixer.name for case in alone} == set(SERIAL)
    assert not any(case.runtime for case in alone)


@pytest.mark.parametrize("mixer", OTHERS)
def test_each_mixer_is_right_and_what_is_wrong_is_seen(mixer: str) -> None:
    r = draw(mixer, f"any:random{NODES}d4")
    _, entries = contest.ours(r.case, r, contest.remember(r))
    core, solve = (play(entry()) for entry in entries)
    window = {"window"} if MIXERS[mixer].convolved else set()
    assert set(core) == {"o", "state"} | window
    assert set(solve) == {"o", "state"}


# state, then a node: row, gates, outputs, stored row and gates, of 1 key and 2 value heads of 16
ROW, OUT, STATE = 2 * (2 * 16 + 2 * 16), 2 * 2 * 16, 2 * 16 * 16 * 4
MOVED = {
    "gdn_neg": ROW + 2 * 4 + OUT + ROW + 4 * 4,
    "deltanet": ROW + 2 * 2 + OUT + ROW + 4 * 2,
    "kda": ROW + 2 * (2 * 16 + 2) + OUT + ROW + 4 * (2 * 16 + 2),
    "mamba2": ROW + 2 * 2 + OUT + ROW + 4 * 4,
    "lightning": ROW + OUT + ROW,
}


@pytest.mark.parametrize("mixer", MOVED)
def test_the_floor_counts_what_a_mixer_moves(mixer: str) -> None:
    r = draw(mixer)
    want = 2 * STATE + 2 * NODES * MOVED[mixer]
    assert floor_bytes(r, convolved=False) == want
    assert floor_bytes(r, convolved=True) == want - 2 * NODES * 2 * 16


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fetched kernels as if on an older GPU, and no trace of their package afterwards."""
    if not (FOLDER / "sglang/kernels/ops/mamba/triton_ops/mamba_ssm.py").is_file():
        pytest.skip("other projects' kernels are not kept here: python benchmarks/peers/fetch.py")
    monkeypatch.setenv("PEERS_SM", "80")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cpu, "device", nullcontext, raising=False)
    known = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
    kept = {name: sys.modules.pop(name) for name in known}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("mixer", SERIAL)
def test_the_peers_verifiers_are_right_on_the_same_operands(mixer: str) -> None:
    r = draw(mixer)
    found = {}
    for entry in contest.peers(r.case, r, contest.remember(r)):
        system = entry()
        if system.name != "sglang.conv":
            found[system.name] = play(system)
    assert set(found["sglang.solve"]) == {"o", "state"}
    assert set(found["sglang.core"]) == {"o", "conv", "links"}

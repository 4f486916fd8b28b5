"""Many rounds on one slot, beside an exact history and an honest one that rounds."""

from types import ModuleType
from typing import Any

import numpy as np
import torch

from bolegen import oracle
from bolegen.ir import GDN, Mixer, find_mixer
from bolegen.oracle import Array
from support.judge import LIMIT, Worst, numpy64, operands
from support.rounds import Round, make_round

__all__ = ["History", "play_rounds"]


class History:
    """What one slot must hold: the exact state, an honest copy that rounds, and every raw row."""

    def __init__(self, m: ModuleType, r: Round, slot: int) -> None:
        self.exact = numpy64(r.state[0, slot])
        self.honest = self.exact.copy()
        self.window = numpy64(r.conv_state[0, slot])
        self.kind = m.MODULE.state_dtype

    def accept(self, m: ModuleType, r: Round, factors: Any, row: int, last: int) -> None:
        """Carry both along the path to `last`, from the rows that the kernel rounded."""
        known = operands(m, r, factors.convolved_rows(0), 0, row)[1:]
        mixer = find_mixer(m.MODULE.mixer)
        self.exact = oracle.committed_state(r.trees[row], last, *known, self.exact, mixer=mixer)
        honest = serially(r.trees[row], last, *known, self.honest, mixer)
        self.honest = numpy64(torch.from_numpy(honest).to(self.kind))
        raw = numpy64(r.x[0, row])
        if mixer.convolved:
            self.window = oracle.committed_window(r.trees[row], last, raw, self.window)

    def judge(self, r: Round, slot: int, worst: Worst) -> None:
        """The state errs as the honest copy does, but for chance; the window not at all."""
        assert np.array_equal(numpy64(r.conv_state[0, slot]), self.window)
        got = numpy64(r.state[0, slot])
        for head in range(len(got)):
            honest = np.linalg.norm(self.honest[head] - self.exact[head])
            limit = max(1.5 * honest, LIMIT * np.linalg.norm(self.exact[head]))
            worst.note("state", float(np.linalg.norm(got[head] - self.exact[head])), float(limit))


def serially(
    parents: list[int],
    last: int,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    mixer: Mixer = GDN,
) -> Array:
    """The accepted tokens one after another, in float32."""
    single = np.float32
    current = state.astype(single)
    ratio = v.shape[1] // k.shape[1]
    for node in oracle.find_path(parents, last):
        for head in range(len(current)):
            key = k[node, head // ratio].astype(single)
            current[head] *= np.exp(single(g[node, head]))
            known = current[head] @ key if mixer.delta else single(0)
            u = single(beta[node, head]) * (v[node, head].astype(single) - known)
            current[head] += np.outer(u, key)
    return current.astype(np.float64)


def play_rounds(m: ModuleType, rounds: int, *, write: float, device: str = "cpu") -> Worst:
    """Random rows round after round, a random accepted node each time; slow decays."""
    numbers = np.random.default_rng(3)
    r = make_round(m, batch=1, slots=2, log_rate=(-7.0, -4.0), write=write, device=device)
    slot = int(r.slots[0])
    history, worst = History(m, r, slot), Worst()
    factors = m.allocate(1, 1, device)
    for number in range(rounds):
        fresh = make_round(m, batch=1, seed=number, write=write, repeat=0.5 * (number % 2))
        for name in ("x", "a", "b"):
            setattr(r, name, getattr(fresh, name).to(device))
        r.verify(m, factors)
        last = int(numbers.integers(-1, m.MODULE.nodes))
        r.commit(m, factors, [last])
        history.accept(m, r, factors, 0, last)
        if number % 32 == 31:
            history.judge(r, slot, worst)
    history.judge(r, slot, worst)
    return worst

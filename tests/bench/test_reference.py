"""The benchmark's reference is the oracle, and its operands decide nothing by a tie."""

import numpy as np
import pytest
import torch

from benchmarks.cases import Case
from benchmarks.operands import DTYPE, convolve, draw_operands
from benchmarks.reference import over_contract, over_relative, solve_exactly
from bolegen import oracle
from bolegen_runtime.contract import LIMIT
from support.judge import numpy64

CASE = Case("verify", "tiny", "eagle64", 3)


def test_the_reference_is_the_oracle() -> None:
    r = draw_operands(CASE, 2, "cpu")
    exact = solve_exactly(r, 1)
    for row in range(CASE.batch):
        slot, node = int(r.slots[row]), int(r.last[row])
        want = oracle.verify(
            r.parents, *map(numpy64, (r.x[1, row], r.a[1, row], r.b[1, row], r.weight)),
            *map(numpy64, (r.A_log, r.dt_bias, r.state[1, slot], r.windows[1, slot])),
            key_heads=CASE.shape.key_heads, keep_states=True,
            round_rows=lambda rows: numpy64(torch.from_numpy(rows).to(DTYPE)),
        )  # fmt: skip
        assert want.states is not None
        np.testing.assert_allclose(exact.o[row], want.o, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(exact.state[row], want.states[node], rtol=1e-9, atol=1e-12)
        window = oracle.committed_window(
            r.parents, node, numpy64(r.x[1, row]), numpy64(r.windows[1, slot])
        )
        assert np.array_equal(numpy64(exact.window[row]), window)


def test_a_float32_convolution_rounds_to_the_same_rows() -> None:
    r = draw_operands(CASE, 1, "cpu", seed=5)
    windows = r.windows[0, r.slots.long()]
    exact = convolve(r.x[0], windows, r.weight, r.parents)
    assert torch.equal(exact.to(DTYPE), r.rows[0])
    assert torch.equal(exact.float().nextafter(torch.tensor(9.0)).to(DTYPE), r.rows[0])


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_an_error_is_measured_against_its_limit(factor: float) -> None:
    exact = torch.ones(2, 5, 8, dtype=torch.float64)
    got = (exact * (1 + factor * LIMIT)).float()
    assert (over_contract(got, exact, (1, 2)) < 1) == (factor < 1)
    assert over_relative(got, exact, (1, 2), 2 * LIMIT) < 1
    got[0, 0, 0] = torch.nan
    assert over_contract(got, exact, (1, 2)) == torch.inf

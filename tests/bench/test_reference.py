"""The benchmark's reference is the oracle, and its operands decide nothing by a tie."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.cases import Case
from benchmarks.operands import DTYPE, convolve, draw_operands
from benchmarks.reference import over_contract, over_relative, solve_exactly
from bolegen import oracle
from bolegen.ir import MIXERS, Mixer
from bolegen_runtime.contract import LIMIT
from support.judge import numpy64

CASE = Case("verify", "tiny", "eagle64", 3)


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())
def test_the_reference_is_the_oracle(mixer: Mixer) -> None:
    case = replace(CASE, model=f"tiny-{mixer.name}")
    r = draw_operands(case, 2, "cpu")
    exact = solve_exactly(r, 1)
    weight = numpy64(r.weight) if mixer.convolved else None
    bias = None if r.bias is None else numpy64(r.bias)
    heads = numpy64(r.A_log), numpy64(r.dt_bias)
    for row in range(case.batch):
        slot, node = int(r.slots[row]), int(r.last[row])
        x, a, b = (numpy64(each[1, row]) for each in (r.x, r.a, r.b))
        state, window = numpy64(r.state[1, slot]), numpy64(r.windows[1, slot])
        want = oracle.verify(
            r.parents, x, a, b, weight, *heads, state, window,
            key_heads=case.shape.key_heads, keep_states=True, mixer=mixer, conv_bias=bias,
            D=numpy64(r.D) if mixer.skip else None,
            round_rows=lambda rows: numpy64(torch.from_numpy(rows).to(DTYPE)),
        )  # fmt: skip
        assert want.states is not None
        np.testing.assert_allclose(exact.o[row], want.o, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(exact.state[row], want.states[node], rtol=1e-9, atol=1e-12)
        committed = oracle.committed_window(r.parents, node, x, window)
        assert np.array_equal(numpy64(exact.window[row]), committed)


def test_a_float32_convolution_rounds_to_the_same_rows() -> None:
    r = draw_operands(CASE, 1, "cpu", seed=5)
    windows = r.windows[0, r.slots.long()]
    exact = convolve(r.x[0], windows, (r.weight, r.bias), r.parents)
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

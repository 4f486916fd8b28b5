"""Write gates above 1, as mixers with negative eigenvalues have them: beta to 1.9."""

import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from bolegen import oracle
from bolegen.codegen import compile_template
from bolegen.codegen.emit import digest_of
from bolegen.ir import DType, LayerSpec, Solver
from support.rounds import import_module, make_round, play

GAIN = 1.9


def gained(template: str, dtype: DType, solver: Solver | None) -> ModuleType:
    """A module whose write gate is 1.9 sigmoid(b)."""
    spec = LayerSpec(key_heads=1, value_heads=1, d_k=32, d_v=32, dtype=dtype, factors="pku")
    was = compile_template(template, spec, solver=solver)
    gate = r"b_beta = tl\.where\(m, _sigmoid\(b_b\), 0\.0\)"
    text, count = re.subn(gate, f"b_beta = tl.where(m, {GAIN} * _sigmoid(b_b), 0.0)", was.text)
    assert count == 1
    return import_module(replace(was, text=text, digest=digest_of(text)))


@pytest.mark.parametrize("solver", [None, Solver.HORNER])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize(("depth", "repeat"), [(16, 0.9), (32, 1.0)])
def test_parallel_keys_written_twice_over(
    depth: int,
    repeat: float,
    dtype: DType,
    solver: Solver | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = oracle.gates

    def gates(*arguments: Any, **options: Any) -> tuple[oracle.Array, oracle.Array]:
        log_decay, beta = given(*arguments, **options)
        return log_decay, GAIN * beta

    monkeypatch.setattr(oracle, "gates", gates)
    m = gained(f"chain:{depth}", dtype, solver)
    r = make_round(m, batch=1, repeat=repeat, write=12.0, log_rate=(-14.0, -9.0))
    play(m, r, [depth]).assert_within()

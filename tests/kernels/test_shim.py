"""The CPU tests can tell float32-grade products from lesser ones."""

import re
from dataclasses import replace
from types import ModuleType

import pytest

from bolegen.codegen import EmittedModule, compile_template
from bolegen.codegen.emit import digest_of
from bolegen.ir import DType, LayerSpec
from support.rounds import Worst, import_module, make_round, play

TEMPLATE = "chain:15"


def emitted(dtype: DType = DType.FP32, contract: str = "fp32") -> EmittedModule:
    spec = LayerSpec(
        key_heads=1,
        value_heads=1,
        d_k=32,
        d_v=32,
        dtype=dtype,
        factors="pku",
        contract=contract,
    )
    return compile_template(TEMPLATE, spec)


def planted(pattern: str, replacement: str, dtype: DType = DType.FP32) -> ModuleType:
    """The module with one thing replaced in its text."""
    was = emitted(dtype)
    text, count = re.subn(pattern, replacement, was.text)
    assert count, f"nothing to replace: {pattern}"
    return import_module(replace(was, text=text, digest=digest_of(text)))


def judged(m: ModuleType) -> Worst:
    r = make_round(m, batch=1, repeat=0.9, write=2.0, log_rate=(-9.0, -5.0))
    return play(m, r, [15])


@pytest.mark.parametrize("dtype", list(DType))
def test_the_module_itself_keeps_the_contract(dtype: DType) -> None:
    judged(import_module(emitted(dtype))).assert_within()


@pytest.mark.parametrize("dtype", list(DType))
def test_tf32_products_fail_the_fp32_contract(dtype: DType) -> None:
    worst = judged(planted('"tf32x3"', '"tf32"', dtype))
    assert worst.ratios["u"] > 3


def test_the_tf32_contract_is_another_module_and_fails_it_too() -> None:
    assert judged(import_module(emitted(contract="tf32"))).ratios["u"] > 3


def test_one_bf16_term_of_the_state_fails_the_fp32_contract() -> None:
    # the second term is what is left of the state after the first
    worst = judged(planted(r"b_s2 = \(b_s - b_s1\)", "b_s2 = (b_s * 0)", DType.BF16))
    assert worst.ratios["u"] > 3


def test_a_state_rounded_to_bf16_on_the_way_fails_the_fp32_contract() -> None:
    worst = judged(planted(r"b_s\.to\(tl\.float32\)", "b_s.to(tl.bfloat16).to(tl.float32)"))
    assert worst.ratios["state"] > 3 or worst.ratios["u"] > 3


def test_a_decay_rounded_to_bf16_fails_the_fp32_contract() -> None:
    worst = judged(
        planted(
            r"b_g = tl\.where\(m, (_log_decay\(b_x, b_log\)), 0\.0\)",
            r"b_g = tl.where(m, \1.to(tl.bfloat16).to(tl.float32), 0.0)",
        )
    )
    assert max(worst.ratios["state"], worst.ratios["o"]) > 1

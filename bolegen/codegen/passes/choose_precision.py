"""Choose how each product keeps the contract."""

from dataclasses import replace

from bolegen.ir import DType, Precision, TreePlan

__all__ = ["choose_precision"]

_READOUT_TERMS = {"split": 2, "bf16": 1}


def choose_precision(plan: TreePlan) -> TreePlan:
    """Precision: ieee everywhere -> by operand (docs/theory.md, fact 3).

    bf16 activations are exact bf16 operands, so a float32 state needs two bf16 terms against
    them, a bf16 state one. Y and R meet in O only, which is rounded to bf16: two terms
    of each, and bf16x3 where Y is formed; with readout bf16 one term of each.
    Other pairs of float32 (G, Y, U; with fp16 or fp32 activations everything) multiply as
    tf32x3, on AMD as bf16x6; under the tf32 contract as tf32 and bf16x3.
    """
    spec = plan.spec
    fast = spec.contract == "tf32"
    terms, rounded = 0, spec.dtype is DType.BF16
    if spec.dtype is DType.BF16 and not (fast and spec.state_dtype is DType.FP32):
        terms = 2 if spec.state_dtype is DType.FP32 else 1
    precision = Precision(
        state_terms=terms,
        readout_terms=_READOUT_TERMS[spec.readout] if rounded else 0,
        fold="bf16x3" if rounded and spec.factors == "replay" and spec.mixer.delta else None,
        dot="tf32" if fast else "tf32x3",
        hip_dot="bf16x3" if fast else "bf16x6",
    )
    return replace(plan, precision=precision)

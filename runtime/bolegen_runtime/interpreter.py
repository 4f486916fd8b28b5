"""A faithful Triton interpreter: what TRITON_INTERPRET=1 computes, made what a GPU computes.

Triton 3.6 and 3.9 keep bf16 in numpy's uint16 and then compute on those integers; they truncate
float32 to bf16 and run a tf32 dot in full float32. `install()` mends that in place, for every
kernel of the process; PATCHES lists what it replaces. Only tests and CPU examples call it.

A bf16 operand is widened to float32 (exact), computed on, and the result rounded once, to
nearest even: add, sub, mul, div, sqrt and fma come out correctly rounded, as on a GPU. A bf16
reduction or scan is one float32 reduction rounded at the end; a GPU may round every step. A dot
multiplies and sums in float32, after its float32 operands were rounded as `input_precision` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter as ti

from bolegen_runtime.interpreter_shortcuts import SHORTCUTS

__all__ = ["install", "is_interpreting", "round_to_bf16", "round_to_tf32"]

Array: TypeAlias = NDArray[Any]
Method: TypeAlias = Callable[..., Any]


def round_to_bf16(x: Array) -> Array:
    """Round float32 to the nearest bf16, ties to even, kept in float32. NaN stays NaN."""
    return _bf16_to_float32(_float32_to_bf16(x))


def round_to_tf32(x: Array) -> Array:
    """Round float32 to 10 bits of mantissa, ties away from zero (PTX's cvt.rna.tf32.f32).

    Compiled tf32x3 dots round so; plain tf32 ones leave the low 13 bits to the tensor core.
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(special, bits, rounded).view(np.float32)


def _bf16_to_float32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _float32_to_bf16(x: Array, *, truncate: bool = False) -> Array:
    bits = np.asarray(x, np.float32).view(np.uint32)
    high = bits >> np.uint32(16)
    # half a unit, less one if the last bit is even: the sum carries just when rounding goes up
    half = np.uint32(0) if truncate else np.uint32(0x7FFF) + (high & np.uint32(1))
    quiet_nan = high | np.uint32(0x0040)
    return np.where(np.isnan(x), quiet_nan, (bits + half) >> np.uint32(16)).astype(np.uint16)


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, ti.TensorHandle) and handle.dtype.scalar.name == "bf16"


def _widen(handle: Any) -> Any:
    """bf16 handle -> float32 handle; anything else as it came."""
    if not _is_bf16(handle):
        return handle
    return ti.TensorHandle(_bf16_to_float32(handle.data), tl.float32)


def _narrow(handle: Any) -> Any:
    """float32 handle -> bf16 handle; anything else (an index, say) as it came."""
    if handle.data.dtype != np.float32:
        return handle
    return ti.TensorHandle(_float32_to_bf16(handle.data), tl.bfloat16)


def _in_float32(original: Method) -> Method:
    """Elementwise operation -> the same, bf16 computed in float32 and rounded once."""

    def mended(self: Any, *args: Any) -> Any:
        narrow = any(map(_is_bf16, args))
        result = original(self, *(map(_widen, args) if narrow else args))
        if result.data.dtype == np.bool_:
            # a comparison carried its operands' dtype, for which later casts and masks took it
            return ti.TensorHandle(result.data, tl.int1)
        return _narrow(result) if narrow else result

    return mended


def _mend_fma(original: Method) -> Method:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        # 3.6 has no true fma, and rounds the product as well
        native = hasattr(ti._interpreter, "fma_fp32")
        if z.data.dtype == np.float64 or (native and z.data.dtype == np.float32):
            return original(self, x, y, z)
        total = np.multiply(_widen(x).data, _widen(y).data, dtype=np.float64) + _widen(z).data
        if not _is_bf16(z):
            return ti.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)
        single = total.astype(np.float32)
        # the first rounding may land on a tie of the second: step back to the side it came from
        bits = single.view(np.int32)
        tie = ((bits & 0xFFFF) == 0x8000) & np.isfinite(single)
        step = np.sign(np.abs(total) - np.abs(single))
        bits = bits + np.where(tie, step, 0).astype(np.int32)
        return _narrow(ti.TensorHandle(bits.view(np.float32), tl.float32))

    return create_fma


def _mend_clamp(_: Method) -> Method:
    def create_clampf(self: Any, x: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        if propagate_nans == ti._ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(x, low), high)
        return self.create_minimumf(self.create_maximumf(x, low), high)

    return create_clampf


def _binary(op: Method) -> Callable[[Method], Method]:
    return lambda _: lambda self, lhs, rhs: self.binary_op(lhs, rhs, op)


def _mend_cast(original: Method) -> Method:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        src = _widen(src)
        if dst_type.scalar != tl.bfloat16:
            return original(self, src, dst_type)
        return _narrow(ti.TensorHandle(src.data.astype(np.float32), tl.float32))

    return cast_impl


def _mend_fp_to_fp(original: Method) -> Method:
    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if not {src.dtype.scalar.name, dst_type.scalar.name} <= {"bf16", "fp16", "fp32", "fp64"}:
            return original(self, src, dst_type, rounding_mode)
        if rounding_mode != ti._ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(src, dst_type)
        if dst_type.scalar != tl.bfloat16:
            return original(self, _widen(src), dst_type, rounding_mode)
        bits = _float32_to_bf16(src.data.astype(np.float32), truncate=True)
        return ti.TensorHandle(bits, tl.bfloat16)

    return create_fp_to_fp


# precision of a float32 dot -> (rounding of a term, terms of an operand); IEEE is not split
SPLITS: dict[Any, tuple[Method, int]] = {
    ti._ir.INPUT_PRECISION.TF32: (round_to_tf32, 1),
    ti._ir.INPUT_PRECISION.TF32x3: (round_to_tf32, 2),
    ti._ir.INPUT_PRECISION.BF16x3: (round_to_bf16, 2),
    ti._ir.INPUT_PRECISION.BF16x6: (round_to_bf16, 3),
}


def _matmul(a: Array, b: Array, precision: Any) -> Array:
    """float32 product of a [.., M, K] and b [.., K, N], split into terms as `precision` says."""
    rounding, count = SPLITS.get(precision, (np.asarray, 1))
    a_terms, b_terms = _split(a, rounding, count), _split(b, rounding, count)
    total: Array = np.zeros(1, np.float32)
    # the smallest products first; those of order `count` and beyond are dropped
    for order in reversed(range(count)):
        # an infinity leaves inf - inf in its later terms; compiled code clears that NaN as well
        total = np.where(np.isnan(total), np.float32(0), total)
        for i in range(order + 1):
            total = total + np.matmul(a_terms[i], b_terms[order - i])
    return total


def _split(x: Array, rounding: Method, count: int) -> list[Array]:
    """Terms of x, largest first: each rounds what those before it leave."""
    terms: list[Array] = []
    for _ in range(count):
        terms.append(rounding(x))
        x = x - terms[-1]
    return terms


def _mend_dot(original: Method) -> Method:
    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        kind = a.dtype.scalar.name
        if kind not in ("bf16", "fp16", "fp32"):
            return original(self, a, b, d, precision, *rest)
        x, y = (_widen(operand).data.astype(np.float32) for operand in (a, b))
        total = _matmul(x, y, precision if kind == "fp32" else None) + d.data
        return ti.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    return create_dot


def _mend_reduction(original: Method) -> Method:
    # these skip NaN as well, but do not warn where there is nothing else
    quiet: dict[Any, Any] = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def mended(self: Any, tensor: Any, **kwargs: Any) -> Any:
        kwargs = {name: quiet.get(value, value) for name, value in kwargs.items()}
        if not _is_bf16(tensor.handle):
            return original(self, tensor, **kwargs)
        result = original(self, _retype(tensor, _widen), **kwargs)
        if isinstance(result, (list, tuple)):
            return type(result)(_retype(item, _narrow) for item in result)
        return _retype(result, _narrow)

    return mended


def _retype(tensor: Any, convert: Method) -> Any:
    handle = convert(tensor.handle)
    shape = list(tensor.type.shape) if tensor.type.is_block() else None
    return tl.core.tensor(handle, tl.block_type(handle.dtype, shape) if shape else handle.dtype)


def _mend_launch(original: Method) -> Method:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        # inf - inf and 0 / 0 are legal in a kernel, and a GPU does not warn
        with np.errstate(all="ignore"):
            return original(self, *args, **kwargs)

    return launch


# everything that is replaced: (owner, name, original -> replacement)
PATCHES: tuple[tuple[Any, str, Callable[[Method], Method]], ...] = (
    (ti.InterpreterBuilder, "unary_op", _in_float32),
    (ti.InterpreterBuilder, "binary_op", _in_float32),
    (ti.InterpreterBuilder, "create_fma", _mend_fma),
    (ti.InterpreterBuilder, "create_minnumf", _binary(np.fmin)),  # 3.6 lets NaN win
    (ti.InterpreterBuilder, "create_maxnumf", _binary(np.fmax)),
    (ti.InterpreterBuilder, "create_clampf", _mend_clamp),
    (ti.InterpreterBuilder, "cast_impl", _mend_cast),
    (ti.InterpreterBuilder, "create_fp_to_fp", _mend_fp_to_fp),
    (ti.InterpreterBuilder, "create_dot", _mend_dot),
    (ti.ReduceOps, "sum", _mend_reduction),
    (ti.ReduceOps, "min_max", _mend_reduction),
    (ti.ScanOps, "cumsum", _mend_reduction),
    (ti.ScanOps, "cumprod", _mend_reduction),
    (ti.GridExecutor, "__call__", _mend_launch),
    *SHORTCUTS,
)


def is_interpreting() -> bool:
    """Whether kernels run on the CPU: TRITON_INTERPRET=1 now, and when triton was imported."""
    return bool(triton.knobs.runtime.interpret) and isinstance(tl.sum, ti.InterpretedFunction)


def install() -> None:
    """Make the interpreter faithful, for the whole process. Calling it again does nothing.

    RuntimeError: TRITON_INTERPRET=1 was not set before triton was imported, or this Triton's
    interpreter lacks something of PATCHES.
    """
    if not is_interpreting():
        raise RuntimeError(
            "bolegen_runtime.interpreter: Triton's interpreter is off; "
            "set TRITON_INTERPRET=1 before the first import of triton"
        )
    # the mark is on triton: this module may be imported twice, under two names
    if getattr(ti, "bolegen_installed", False):
        return
    missing = [
        f"{owner.__name__}.{name}" for owner, name, _ in PATCHES if not hasattr(owner, name)
    ]
    if missing:
        raise RuntimeError(
            f"bolegen_runtime.interpreter: Triton {triton.__version__} has no "
            f"{', '.join(missing)} to replace; this fits 3.6 to 3.9, so install one of those"
        )
    for owner, name, mend in PATCHES:
        setattr(owner, name, mend(getattr(owner, name)))
    # 3.6 lacks it, and a bf16 tensor times 2.0 fails
    ti.InterpreterBuilder.get_bf16 = lambda self, value: _narrow(self.get_fp32(value))
    ti.interpreter_builder.options = dataclasses.replace(
        ti.interpreter_builder.options,
        allowed_dot_input_precisions=("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6"),
        sanitize_overflow=False,  # compiled code wraps as well; asserting is 40 % of the time
    )
    ti.bolegen_installed = True

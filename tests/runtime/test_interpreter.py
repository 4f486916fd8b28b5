"""The mended interpreter computes what torch, float64 and the rounding rules say."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as triton_interpreter

from bolegen_runtime import interpreter

INF, NAN = float("inf"), float("nan")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RUNTIME = Path(interpreter.__file__).parents[1]


@triton.jit
def convert_kernel(x, out, N: tl.constexpr, ROUNDING: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def elementwise_kernel(x, y, z, out, N: tl.constexpr, OP: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x + o)
    b = tl.load(y + o)
    c = tl.load(z + o, mask=o < N - 1, other=1.5)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "neg":
        r = -a
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "affine":
        r = 2.0 * a + 0.5
    elif OP == "fma":
        r = tl.math.fma(a, b, c)
    elif OP == "minimum":
        r = tl.minimum(a, b)
    elif OP == "maximum":
        r = tl.maximum(a, b)
    elif OP == "clamp":
        r = tl.clamp(a, -0.5, 0.5)
    elif OP == "where":
        r = tl.where(a > b, a, 0.0)
    elif OP == "less":
        r = (a < b).to(a.dtype)
    elif OP == "equal":
        r = (a == b).to(tl.int32).to(a.dtype)
    else:
        tl.static_assert(OP == "other")
        r = c
    tl.store(out + o, r)


@triton.jit
def reduce_kernel(x, out, ROWS: tl.constexpr, COLS: tl.constexpr, OP: tl.constexpr):
    o_r = tl.arange(0, ROWS)
    o_c = tl.arange(0, COLS)
    o_rc = o_r[:, None] * COLS + o_c[None, :]
    a = tl.load(x + o_rc)
    if OP == "cumsum":
        tl.store(out + o_rc, tl.cumsum(a, 1))
    elif OP == "cumprod":
        tl.store(out + o_rc, tl.cumprod(a, 1, reverse=True))
    elif OP == "sum":
        tl.store(out + o_r, tl.sum(a, 1))
    elif OP == "total":
        tl.store(out, tl.sum(a))
    elif OP == "max":
        tl.store(out + o_r, tl.max(a, 1))
    elif OP == "min":
        tl.store(out + o_r, tl.min(a, 1))
    else:
        tl.store(out + o_r, tl.argmax(a, 1).to(a.dtype))


@triton.jit
def dot_kernel(a, b, c, out, N: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.load(c + o)
    tl.store(out + o, tl.dot(tl.load(a + o), tl.load(b + o), acc, input_precision=PRECISION))


@triton.jit
def triple(x):
    return 3 * x, tl.sum(x > 0)


@triton.jit
def idioms_kernel(x, lengths, out, N: tl.constexpr):
    """Rows cut at a loaded length; a negative one returns early. Sums rows 0 .. length - 1."""
    i_b = tl.program_id(0)
    length = tl.load(lengths + i_b)
    o = tl.arange(0, N)
    if length < 0:
        return
    b_acc = tl.zeros([N], tl.float32)
    for i in range(length):
        b_acc += tl.load(x + tl.cast(i, tl.int64) * N + o)
    b_tripled, positive = triple(b_acc)
    last = tl.where(length > 0, length - 1, 0)
    keep = (length > 0) & (o < N - 1)
    tl.store(out + i_b * N + o, b_tripled + positive.to(tl.float32) + last, mask=keep)


def launch(kernel, *args: object) -> None:
    kernel[(1,)](*args)


def convert(x: Tensor, dtype: torch.dtype, rounding: str | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    launch(convert_kernel, x, out, x.numel(), rounding)
    return out


def elementwise(op: str, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch(elementwise_kernel, x, y, z, out, x.numel(), op)
    return out


def dot(a: Tensor, b: Tensor, precision: str | None = None, c: Tensor | None = None) -> Tensor:
    out = torch.empty(a.shape)
    launch(dot_kernel, a, b, torch.zeros(a.shape) if c is None else c, out, len(a), precision)
    return out


def hard_floats(count: int, seed: int = 0) -> Tensor:
    """float32 [count]: every exponent, ties of bf16 and of fp16, infinities, NaN, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    bits[: count // 4] = (bits[: count // 4] & ~0xFFFF) | 0x8000  # ties of bf16
    x = bits.view(FP32).clone()
    half = torch.randn(count // 4, generator=generator).to(FP16)
    x[count // 2 : count // 2 + count // 4] = half.float() * (1 + 2.0**-12)  # near ties of fp16
    largest = torch.finfo(FP32).max
    x[-12:] = torch.tensor(
        [0.0, -0.0, INF, -INF, NAN, -NAN, largest, 1e-45, 1e-40, 3e38, 65520, 6e-8]
    )
    return x


def bf16_rows(count: int, seed: int) -> Tensor:
    """bf16 [count] of moderate size, with infinities, NaN and zeros at the front."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(BF16)
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-40, 3e38, 1.0], dtype=BF16)
    x[: special.numel()] = special.roll(seed)
    return x


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal values, NaN where NaN, and zeros of one sign."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    number = ~want.isnan()
    assert torch.equal(torch.signbit(got)[number], torch.signbit(want)[number])


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def nearest_bf16(exact: np.ndarray) -> Tensor:
    """float64, finite and normal in bf16 -> bf16 by one rounding to 8 bits, ties to even."""
    mantissa, exponent = np.frexp(exact)
    return torch.from_numpy(np.ldexp(np.rint(mantissa * 2**8) / 2**8, exponent)).to(BF16)


def nearest_tf32(x: Tensor) -> Tensor:
    """float32 -> float64 of 11 significant bits, ties away from zero."""
    mantissa, exponent = np.frexp(x.double().numpy())
    rounded = np.copysign(np.floor(np.abs(mantissa) * 2**11 + 0.5) / 2**11, mantissa)
    return torch.from_numpy(np.ldexp(rounded, exponent))


# conversions


def test_every_bf16_pattern_survives_widening_and_copying():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    assert torch.equal(convert(x, BF16).view(torch.int16), x.view(torch.int16))
    assert torch.equal(convert(x, FP32).view(torch.int32), x.float().view(torch.int32))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_float32_is_rounded_as_torch_rounds_it(dtype: torch.dtype, seed: int):
    x = hard_floats(4096, seed)
    assert_same(convert(x, dtype), x.to(dtype))
    assert_same(convert(x, dtype, "rtne"), x.to(dtype))


def test_rounding_towards_zero_can_be_asked_for():
    x = hard_floats(1024)
    want = (x.view(torch.int32) & ~0xFFFF).view(FP32)
    assert_same(convert(x, BF16, "rtz"), torch.where(x.isnan(), x, want).to(BF16))


def test_bf16_and_fp16_convert_to_each_other_as_torch_does():
    x = hard_floats(1024)
    assert_same(convert(x.to(BF16), FP16), x.to(BF16).to(FP16))
    assert_same(convert(x.to(FP16), BF16), x.to(FP16).to(BF16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_bf16_and_integers_convert_as_torch_does(dtype: torch.dtype):
    top = min(torch.iinfo(dtype).max, 2**24 + 9)
    integers = torch.cat([torch.arange(120), torch.arange(top - 7, top + 1)]).to(dtype)
    assert_same(convert(integers, BF16), integers.to(BF16))
    floats = torch.linspace(0 if dtype == torch.uint8 else -100, 100, 128).to(BF16)
    assert torch.equal(convert(floats, dtype), floats.to(dtype))


# arithmetic

EXPECTED = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "div": lambda a, b, c: a / b,
    "abs": lambda a, b, c: a.abs(),
    "minimum": lambda a, b, c: torch.fmin(a, b),
    "maximum": lambda a, b, c: torch.fmax(a, b),
    "where": lambda a, b, c: torch.where(a > b, a, 0.0),
    "less": lambda a, b, c: (a < b).float(),
    "equal": lambda a, b, c: (a == b).float(),
    "other": lambda a, b, c: torch.cat([c[:-1], torch.tensor([1.5])]),
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("op", EXPECTED)
def test_elementwise_results_are_float32_results_rounded_once(op: str, dtype: torch.dtype):
    x, y, z = (bf16_rows(256, seed).to(dtype) for seed in range(3))
    y[100:120] = x[100:120]
    want = EXPECTED[op](x.float(), y.float(), z.float()).to(dtype)
    torch.testing.assert_close(elementwise(op, x, y, z), want, rtol=0, atol=0, equal_nan=True)


def test_unary_minus_of_bf16_negates_the_number():
    x = bf16_rows(256, 0)
    torch.testing.assert_close(elementwise("neg", x, x, x), -x, rtol=0, atol=0, equal_nan=True)


def test_a_python_constant_takes_the_dtype_of_the_bf16_tensor():
    x = bf16_rows(256, 0)
    want = (2.0 * x.float()).to(BF16).float() + 0.5
    got = elementwise("affine", x, x, x)
    torch.testing.assert_close(got, want.to(BF16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_clamp_takes_nan_to_the_lower_bound(dtype: torch.dtype):
    x = bf16_rows(256, 0).to(dtype)
    assert_same(elementwise("clamp", x, x, x), torch.where(x.isnan(), -0.5, x.clamp(-0.5, 0.5)))


def test_fma_of_bf16_rounds_once():
    x, y, z = (bf16_rows(512, seed)[8:] for seed in range(3))
    x, y, z = (torch.cat([t, torch.ones(8, dtype=BF16)]) for t in (x, y, z))
    # 9 * 29 = 261 is a tie in bf16; float32 cannot hold what decides it
    x[0], y[0], z[0] = 9, 29, 2.0**-30
    x[1], y[1], z[1] = 9, -29, 2.0**-30
    exact = x.double() * y.double() + z.double()
    exact[-1] = 2.5  # the masked row: 1 * 1 + 1.5
    got = elementwise("fma", x, y, z)
    assert got[0] == 262
    assert got[1] == -260
    assert_same(got, nearest_bf16(exact.numpy()))


def test_fma_of_float32_rounds_once():
    x = torch.full((16,), 1 + 2.0**-12)
    want = torch.full((16,), 2.0**-11 + 2.0**-24)  # x * x - 1, whose last bit x * x has lost
    assert torch.equal(elementwise("fma", x, x, torch.full((16,), -1.0))[:-1], want[:-1])


def test_infinities_and_nan_raise_no_warning():
    x, out = torch.full((16,), INF), torch.empty(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert elementwise("sub", x, x, x).isnan().all()
        launch(reduce_kernel, torch.full((4, 4), NAN), out, 4, 4, "max")
    assert out.isnan().all()


# reductions, on eighths whose float32 sums are exact in any order


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("op", ["sum", "total", "max", "min", "argmax", "cumsum"])
def test_reductions_are_float32_reductions_rounded_once(op: str, dtype: torch.dtype):
    x = (torch.randint(-24, 25, (8, 16), generator=torch.Generator().manual_seed(1)) / 8).to(dtype)
    x[3, 5], x[4, 7] = 4.0, -4.0
    wide = x.float()
    want = {
        "sum": wide.sum(1),
        "total": wide.sum().reshape(1),
        "max": wide.amax(1),
        "min": wide.amin(1),
        "argmax": wide.numpy().argmax(1),
        "cumsum": wide.cumsum(1),
    }[op]
    out = torch.empty(want.shape, dtype=dtype)
    launch(reduce_kernel, x, out, 8, 16, op)
    assert torch.equal(out, torch.as_tensor(want).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_reversed_product_multiplies_numbers(dtype: torch.dtype):
    x = torch.tensor([[-2.0, 1.0, 3.0, 0.5], [1.0, -1.0, 4.0, -0.25]]).to(dtype)
    out = torch.empty_like(x)
    launch(reduce_kernel, x, out, 2, 4, "cumprod")
    assert torch.equal(out, x.float().flip(1).cumprod(1).flip(1).to(dtype))


# dots


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(32, 32, generator=generator) for _ in range(2))
    return a, b


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_dot_of_half_precision_operands_is_exact_to_float32(dtype, operands):
    a, b = (x.to(dtype) for x in operands)
    c = operands[0]
    want = a.double() @ b.double() + c.double()
    for precision in (None, "tf32", "ieee"):
        assert relative_error(dot(a, b, precision, c), want) < 3e-7


def test_a_tf32_dot_rounds_its_operands_to_ten_bits(operands):
    a, b = operands
    got = dot(a, b, "tf32")
    assert relative_error(got, nearest_tf32(a) @ nearest_tf32(b)) < 3e-7
    assert 1e-4 < relative_error(got, a.double() @ b.double()) < 1e-3
    assert torch.equal(dot(a, b), got), "tf32 is what a dot of float32 defaults to"


@pytest.mark.parametrize(
    ("precision", "bound"),
    [("ieee", 1e-6), ("tf32x3", 1e-6), ("bf16x6", 1e-6), ("bf16x3", 2e-5)],
)
def test_split_dots_recover_float32(precision: str, bound: float, operands):
    a, b = operands
    assert relative_error(dot(a, b, precision), a.double() @ b.double()) < bound


def test_two_bf16_terms_are_told_from_three(operands):
    a, b = operands
    assert relative_error(dot(a, b, "bf16x3"), a.double() @ b.double()) > 1e-6


@pytest.mark.parametrize(
    ("precision", "ulp", "want"),
    [
        ("tf32", 2.0**-11, 1 + 2.0**-10),  # a tie, away from zero
        ("tf32", 2.0**-11 - 2.0**-23, 1.0),
        ("tf32x3", 2.0**-11, 1 + 2.0**-11),
        ("bf16x3", 2.0**-8, 1 + 2.0**-8),
        ("ieee", 2.0**-23, 1 + 2.0**-23),
        ("bf16x6", 2.0**-23, 1 + 2.0**-23),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_planted_mantissas(precision: str, ulp: float, want: float, sign: int):
    a = torch.eye(16) * sign * (1 + ulp)
    assert torch.equal(dot(a, torch.eye(16), precision).diagonal(), torch.full((16,), sign * want))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3", "bf16x3", "bf16x6"])
def test_infinities_pass_through_a_dot(precision: str):
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    a[2, 3], a[5, 1] = INF, NAN
    got = dot(a, b, precision)
    assert (got[2] == INF).all()
    assert got[5].isnan().all()
    assert (got[:2] == 16).all()


@pytest.mark.parametrize("rounding", [interpreter.round_to_tf32, interpreter.round_to_bf16])
def test_rounding_again_changes_nothing(rounding):
    x = hard_floats(2048).numpy()
    once = rounding(x)
    assert np.array_equal(np.isnan(once), np.isnan(x))
    assert np.array_equal(once.view(np.uint32), rounding(once).view(np.uint32))


# language


def test_common_idioms_run():
    x, lengths = torch.ones(8, 4), torch.tensor([3, -1, 0, 8], dtype=torch.int32)
    out = torch.full((4, 4), -1.0)
    idioms_kernel[(4,)](x, lengths, out, 4)
    row = torch.tensor([1.0, 1.0, 1.0, 0.0])
    # 3 * length, 4 positive columns, length - 1; the last column is masked
    want = torch.stack([(9 + 4 + 2 + 1) * row, 0 * row, 0 * row, (24 + 4 + 7 + 1) * row]) - 1
    assert torch.equal(out, want)


def test_a_launch_leaves_no_interpreted_builtin_in_the_language():
    launch(reduce_kernel, torch.ones(4, 4), torch.empty(4), 4, 4, "sum")
    for builtin in (tl.load, tl.core.where, tl.core.reduce, tl.core.tensor.__add__):
        assert tl.core.is_builtin(builtin)


# installation


def test_installing_again_does_nothing():
    before = [getattr(owner, name) for owner, name, _ in interpreter.PATCHES]
    interpreter.install()
    assert [getattr(owner, name) for owner, name, _ in interpreter.PATCHES] == before


def test_a_part_that_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_interpreter, "bolegen_installed", False)
    patch = (triton_interpreter.InterpreterBuilder, "create_warp", lambda original: original)
    monkeypatch.setattr(interpreter, "PATCHES", (patch,))
    with pytest.raises(RuntimeError, match=rf"{triton.__version__} has no .*\.create_warp"):
        interpreter.install()


def test_installing_without_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch):
    assert interpreter.is_interpreting()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not interpreter.is_interpreting()
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before"):
        interpreter.install()


def test_setting_the_variable_after_the_import_is_an_error():
    code = (
        "import triton, os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from bolegen_runtime import interpreter; interpreter.install()"
    )
    clean = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"PYTHONPATH": str(RUNTIME)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "set TRITON_INTERPRET=1 before the first import of triton" in done.stderr

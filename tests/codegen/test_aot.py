"""What the ahead-of-time build refuses of LLVM's output."""

import pytest

from bolegen.aot import expect_sound
from bolegen.errors import EmitError
from bolegen.ir import Kernel, find_target

KERNEL = Kernel("factor_x", (), 4, 1)
PAIR = "  %7 = shl nuw nsw <2 x i32> %6, <i32 {}, i32 {}>, !dbg !97"


def test_a_shift_that_may_overflow_beside_one_that_may_not_is_refused() -> None:
    with pytest.raises(EmitError, match=r"factor_x for sm_90: .* shifts by 31 and 1 as one"):
        expect_sound(KERNEL, find_target("sm_90"), PAIR.format(31, 1))


@pytest.mark.parametrize(
    "line",
    [PAIR.format(2, 2), PAIR.format(31, 1).replace("nuw nsw ", ""), "  %7 = shl nuw i32 %6, 2"],
)
def test_other_shifts_pass(line: str) -> None:
    expect_sound(KERNEL, find_target("sm_90"), line)

"""What types and tensors share in the interpreter is what they would say alone."""

# mypy: disable-error-code="no-untyped-call"

import math
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

ELEMENTS = [
    tl.float32, tl.bfloat16, tl.int1, tl.int32, tl.pointer_type(tl.float32),
    tl.pointer_type(tl.int32), tl.pointer_type(tl.float32, "shared"),
    tl.pointer_type(tl.float32, const=True),
]  # fmt: skip
SHAPES = [(4,), (1, 4), (4, 1), (2, 2), (16,)]
KINDS = [(element, shape) for element in ELEMENTS for shape in SHAPES]


def sizes(shape: Any) -> tuple[int, ...]:
    return tuple(tl.core._unwrap_if_constexpr(size) for size in shape)


@pytest.mark.parametrize("wrap", [int, tl.constexpr])
def test_block_types_say_their_own_dtype_and_shape(wrap: type) -> None:
    for _ in range(2):
        made = [tl.block_type(element, list(map(wrap, shape))) for element, shape in KINDS]
        for block, (element, shape) in zip(made, KINDS, strict=True):
            assert (block.element_ty, sizes(block.shape)) == (element, shape)
            assert block.numel == math.prod(shape)
            assert str(element) in block.name
    for at, one in enumerate(made):
        same = [bool(one == tl.block_type(element, list(shape))) for element, shape in KINDS]
        assert same == [at == other for other in range(len(KINDS))]


def test_tensors_of_one_type_share_no_values() -> None:
    types = [*ELEMENTS, *(tl.block_type(element, list(shape)) for element, shape in KINDS)]
    for of in types:
        values = object(), object()
        for value, made in zip(values, [tl.tensor(value, of) for value in values], strict=True):
            assert made.handle is value
            assert made.type is of
            assert made.dtype == of.scalar
            assert sizes(made.shape) == (sizes(of.shape) if of.is_block() else ())
            assert made.numel.value == math.prod(sizes(made.shape))


@pytest.mark.parametrize(("shape", "error"), [([3], ValueError), ([], TypeError)])
def test_wrong_shapes_are_refused_each_time(shape: list[int], error: type[Exception]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.float32, shape)


def test_numpy_sees_pointers_as_addresses_and_bf16_as_its_bits() -> None:
    wanted = {"fp32": np.float32, "bf16": np.uint16, "int1": np.bool_, "int32": np.int32}
    for element in ELEMENTS:
        want = wanted.get(element.name, np.uint64)
        for of in (element, tl.block_type(element, [4]), element):
            assert triton_interpreter._get_np_dtype(of) == np.dtype(want)

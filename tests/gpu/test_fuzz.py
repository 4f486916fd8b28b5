"""On the device: calls with an operand on the CPU, or of another shape or dtype."""

import time

import pytest
import torch
from hypothesis import given, settings

from support.scenes import SCENES
from support.spoils import attack, spoiled

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"  # as tensors name it
EXAMPLES, SECONDS = 25, 0.7  # of one call: all of them stay under 40 s


@pytest.mark.parametrize("name", SCENES)
def test_spoiled_operands_are_named_or_give_the_right_answer(name: str) -> None:
    start = time.monotonic()

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(spoiled(SCENES[name](DEVICE)))
    def run(how: list[tuple[str, str]]) -> None:
        if time.monotonic() - start < SECONDS:
            attack(lambda: SCENES[name](DEVICE), how)

    run()
    torch.cuda.synchronize()  # raises where a kernel was stopped


@pytest.mark.parametrize("name", SCENES)
def test_an_operand_on_the_cpu_is_refused_and_nothing_is_written(name: str) -> None:
    for each, value in SCENES[name](DEVICE).given.items():
        if isinstance(value, torch.Tensor):
            assert attack(lambda: SCENES[name](DEVICE), [(each, "on the CPU")]), each
    torch.cuda.synchronize()

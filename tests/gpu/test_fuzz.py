"""On the device: calls with an operand on the CPU, or of another shape or dtype."""

from functools import partial

import pytest
import torch

from support.graph_scenes import GRAPH_SCENES
from support.scenes import SCENES
from support.spoils import attack, spoiled

pytestmark = pytest.mark.gpu

ALL = SCENES | GRAPH_SCENES
DEVICE = "cuda:0"  # as tensors name it
# other lists than on the CPU; what is taken may be compiled anew, some 25 kernels
PAIRS, MOST, SEED = 40, 25, 1


@pytest.mark.parametrize("name", ALL)
def test_spoiled_operands_are_named_or_give_the_right_answer(name: str) -> None:
    make = partial(ALL[name], DEVICE)
    assert any([attack(make, how) for how in spoiled(make(), PAIRS, MOST, SEED)])
    torch.cuda.synchronize()  # raises where a kernel was stopped


@pytest.mark.parametrize("name", ALL)
def test_an_operand_on_the_cpu_is_refused_and_nothing_is_written(name: str) -> None:
    make = partial(ALL[name], DEVICE)
    for each, value in make().given.items():
        if isinstance(value, torch.Tensor):
            assert attack(make, [(each, "on the CPU")]), each
    torch.cuda.synchronize()

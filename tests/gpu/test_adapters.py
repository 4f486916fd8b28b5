"""The tiny models of tests/adapters on a device, float32 throughout."""

import pytest
import torch

pytest.importorskip("transformers")

from support.adapted import check_tree
from support.tiny_hybrids import TINY, build_tiny

pytestmark = pytest.mark.gpu

# their norms fail on steps of two requests in releases that GPU machines still have
NAMES = [name for name in TINY if "norm" not in name]


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_gives_what_its_paths_give_and_decoding_goes_on(name: str) -> None:
    # transformers' convolutions would round to tf32
    with torch.backends.cudnn.flags(allow_tf32=False):
        check_tree(build_tiny(name).to("cuda"), rtol=1e-3, atol=1e-4)

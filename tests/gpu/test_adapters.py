"""The tiny models of tests/adapters on a device, float32 throughout."""

from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers")

from support.adapted import check_tree
from support.tiny_hybrids import TINY, build_tiny

pytestmark = pytest.mark.gpu

# releases that GPU machines still have lack families; their norms fail on steps of two requests
NAMES = [
    name
    for name, tiny in TINY.items()
    if "norm" not in name and find_spec(f"transformers.models.{tiny.folder}")
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_gives_what_its_paths_give_and_decoding_goes_on(name: str) -> None:
    # transformers' convolutions would round to tf32
    with torch.backends.cudnn.flags(allow_tf32=False):
        check_tree(build_tiny(name).to("cuda"), rtol=1e-3, atol=1e-4)

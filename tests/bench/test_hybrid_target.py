"""Passes of the profiled target against transformers' own forward on the same weights."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks.hybrid_target import HybridTarget, heap_tree
from benchmarks.target_model import build_model, configure, fuse_norms
from bolegen_runtime import Pass, Settings, load
from support.tiny_target import SHAPES, tiny_model

PROMPTS = torch.tensor([[5, 9, 5, 33, 17, 2, 9], [31, 0, 12, 12, 7, 39, 26]])
ROWS, LENGTH = PROMPTS.shape
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # float32; logits are near 1


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(torch.float32)


@pytest.fixture
def target(model: Any) -> HybridTarget:
    """Placed after the prompts, by the caches that transformers' own forward leaves."""
    module = load("any:8", depth=6, dtype="fp32", settings=Settings(), **SHAPES)
    fused = fuse_norms(copy.deepcopy(model))
    made = HybridTarget(fused, {8: module}, batch=ROWS, context=LENGTH + 3)
    take_over(made, model, PROMPTS)
    return made


def forward(model: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """transformers' own: logits [B, T, vocabulary], and its caches by layer."""
    with torch.no_grad():
        logits, cache = model(input_ids=tokens, use_cache=True).to_tuple()
    return logits, cache.layers


def states(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' states [L, B, Hv, dv, dk] and windows [L, B, C, W-1] after the tokens.

    It keeps a state as [B, Hv, dk, dv], and W columns of a window, oldest first.
    """
    _, found = forward(model, tokens)
    recurrent = [found[0], found[2]]
    return (
        torch.stack([entry.recurrent_states[0].mT for entry in recurrent]),
        torch.stack([entry.conv_states[0][..., 1:] for entry in recurrent]),
    )


def take_over(target: HybridTarget, model: Any, prompts: Tensor) -> None:
    """transformers' caches after the prompts into the slots and the KV memory."""
    target.states[:], target.windows[:] = states(model, prompts)
    _, found = forward(model, prompts)
    keys, values = target.memory(0, *prompts.shape)
    keys[:], values[:] = found[1].keys, found[1].values


def path(tree: Sequence[int], node: int) -> list[int]:
    """From the root down to the node."""
    return [*path(tree, tree[node]), node] if node else [0]


@pytest.mark.parametrize("tree", [[-1, 0, 1, 2, 3, 4, 5], heap_tree(7), [-1, 0, 0, 1, 1, 3]])
def test_every_node_is_what_transformers_says_of_its_path(
    model: Any, target: HybridTarget, tree: list[int]
) -> None:
    nodes = len(tree)
    tokens = torch.randint(40, (ROWS, nodes), generator=torch.Generator().manual_seed(1))
    place = target.place(Pass(ROWS, LENGTH, "any:64", ROWS * nodes), tree)
    logits = target.run(tokens, place)
    for node in range(nodes):
        own, _ = forward(model, torch.cat([PROMPTS, tokens[:, path(tree, node)]], 1))
        torch.testing.assert_close(logits[:, node], own[:, -1], **CLOSE)
    taken = torch.cat([PROMPTS, tokens[:, path(tree, nodes - 1)]], 1)
    for pool, own_pool in zip((target.states, target.windows), states(model, taken), strict=True):
        torch.testing.assert_close(pool, own_pool, **CLOSE)


def test_a_decoded_token_is_what_transformers_says(model: Any, target: HybridTarget) -> None:
    tokens = torch.tensor([[7], [22]])
    logits = target.run(tokens, target.place(Pass(ROWS, LENGTH, None, ROWS)))
    taken = torch.cat([PROMPTS, tokens], 1)
    torch.testing.assert_close(logits[:, 0], forward(model, taken)[0][:, -1], **CLOSE)
    for pool, own_pool in zip((target.states, target.windows), states(model, taken), strict=True):
        torch.testing.assert_close(pool, own_pool, **CLOSE)


@pytest.mark.parametrize("spoiled", ["states", "windows", "_keys", "_values"])
def test_each_memory_of_the_prompt_sways_the_logits(
    model: Any, target: HybridTarget, spoiled: str
) -> None:
    """Else the tests above would prove nothing about what was taken over."""
    tokens = torch.tensor([[7], [22]])
    getattr(target, spoiled).mul_(0.9)
    logits = target.run(tokens, target.place(Pass(ROWS, LENGTH, None, ROWS)))
    own, _ = forward(model, torch.cat([PROMPTS, tokens], 1))
    assert (logits[:, 0] - own[:, -1]).abs().amax() > 100 * CLOSE["atol"]


def test_the_configuration_is_the_9b_model() -> None:
    model = build_model(configure(), device="meta", dtype=torch.bfloat16)
    kinds = [kind == "full_attention" for kind in model.config.layer_types]
    assert kinds == [layer % 4 == 3 for layer in range(32)]
    assert sum(weight.numel() for weight in model.parameters()) == 8_953_803_264
    assert model.model.rotary_emb.inv_freq.shape == (32,)
    mixer = model.model.layers[0].linear_attn
    assert (mixer.num_k_heads, mixer.num_v_heads, mixer.conv_dim) == (16, 32, 8192)
    assert (mixer.head_k_dim, mixer.head_v_dim, mixer.conv_kernel_size) == (128, 128, 4)

"""One token mixer at a time: dtypes, what is refused and by which name, and caches."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from bolegen.ir import DType
from bolegen_runtime import adapters
from support.rounds import build
from support.tiny_hybrids import VOCABULARY, build_tiny

INF = math.inf
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an upper limit": ("mamba2", {"time_step_limit": (0.0, 0.1)}, "time_step_limit: .* 0.1"),
    "a lower limit": (
        "granite-4.0-h", {"time_step_limit": (0.01, INF)}, r"time_step_limit: .*\(0.01"
    ),
    "no limits at all": ("bamba", {"time_step_limit": None}, "time_step_limit: .* None"),
    "limits that nothing reads": (
        "nemotron-h", {"time_step_limit": (0.0, 0.1)}, "time_step_limit: .* 0.1"
    ),
    "activation": ("falcon-h1", {"hidden_act": "gelu"}, "^hidden_act .*'gelu'"),
    "Nemotron's activation": (
        "nemotron-h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act .*'relu'"
    ),
    "another bound": ("ling", {"kda_lower_bound": -3.0}, "kda_lower_bound: .* -3.0"),
    "GDN's activation": ("qwen3.5", {"hidden_act": "gelu"}, "^hidden_act: .*'gelu'"),
}  # fmt: skip
# the first Mamba's recurrence
UNKNOWN = {
    "jamba": ("JambaConfig", "JambaMambaMixer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed_is_refused_by_the_name_of_its_field(what: str) -> None:
    name, changes, said = REFUSED[what]
    model = build_tiny(name, **changes)
    with pytest.raises(adapters.AdapterError, match=said):
        adapters.adapt_model(model)


def test_falcons_multipliers_and_heads_of_d_are_asked_for() -> None:
    mixer = adapters.adapt_model(build_tiny("falcon-h1"))[0].token_mixer
    mixer.D = torch.nn.Parameter(torch.ones(4, 16))
    with pytest.raises(adapters.AdapterError, match=r"D: expected .*\(4,\), got \(4, 16\)"):
        adapters.adapt(mixer)
    mixer.D = torch.nn.Parameter(torch.ones(4))
    adapters.adapt(mixer)
    del mixer.mup_vector
    with pytest.raises(adapters.AdapterError, match="ssm_multipliers: "):
        adapters.adapt(mixer)


@pytest.mark.parametrize("folder", UNKNOWN)
def test_other_recurrences_are_not_taken_for_known_ones(folder: str) -> None:
    config, name = UNKNOWN[folder]
    models = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        layer = getattr(models, name)(getattr(models, config)(), layer_idx=0)
    with pytest.raises(adapters.AdapterError, match=f"{name}: .*Nemotron-H"):
        adapters.adapt(layer)
    with pytest.raises(adapters.AdapterError, match="inside; have Qwen3"):
        adapters.adapt_model(layer)


@pytest.mark.parametrize(
    "name", ["qwen3-next", "olmo-hybrid", "kimi-linear", "nemotron-h", "falcon-h1", "minimax"]
)
def test_bf16_layers_are_their_float32_selves_within_roundings(name: str) -> None:
    torch.manual_seed(2)
    model = build_tiny(name).to(torch.bfloat16)
    hidden = torch.randn(1, 3, 32).to(torch.bfloat16)
    found = run_layer(model, hidden, DType.BF16)
    expected = run_layer(model.float(), hidden.float(), DType.FP32)
    assert found.dtype is torch.bfloat16
    # some eight roundings of 2^-9 one after another
    assert (found - expected).norm() <= 0.02 * expected.norm()


def run_layer(model: Any, hidden: Tensor, dtype: DType) -> Tensor:
    layer = adapters.adapt_model(model)[0]
    shapes = layer.shapes
    (hk, hv), (dk, dv) = shapes["heads"], shapes["dims"]
    module = build(
        "(2)", mixer=shapes["mixer"], key_heads=hk, value_heads=hv, d_k=dk, d_v=dv,
        conv=shapes["conv"], dtype=dtype,
    )  # fmt: skip
    gen = torch.Generator().manual_seed(3)
    state = torch.randn(1, hv, dv, dk, generator=gen)
    window = torch.randn(1, 2 * hk * dk + hv * dv, 3, generator=gen).to(torch.bfloat16)
    return layer.verify(
        module, hidden, state, window.to(hidden.dtype) if shapes["conv"] > 1 else None,
        torch.tensor([0]), module.allocate(1, 1, "cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3.5", "mamba2", "minimax"])
def test_caches_come_back_as_they_were_and_padded_rows_are_left_out(name: str) -> None:
    model = build_tiny(name)
    layer = adapters.adapt_model(model)[0]
    cache = prompted(model, 3)
    kept, window = deepcopy(cached(layer, cache))
    (_, hv), (dk, dv) = layer.shapes["heads"], layer.shapes["dims"]
    state = torch.full((4, hv, dv, dk), 7.0)
    columns = None if window is None else torch.full((4, window.shape[1], 3), 7.0)
    slots = torch.tensor([3, -1, 0])
    layer.import_cache(cache, state, columns, slots)
    layout = kept if name == "mamba2" else kept.mT
    assert torch.equal(state[slots[[0, 2]]], layout[[0, 2]])
    assert (state[1:3] == 7).all()
    if columns is not None:
        assert torch.equal(columns[[3, 0]], window[[0, 2], :, -3:])
        assert (columns[1:3] == 7).all()
    state[:3] *= 2
    layer.export_cache(cache, state, columns, slots)
    after, moved = cached(layer, cache)
    assert torch.equal(after[:2], kept[:2])
    assert torch.equal(after[2], 2 * kept[2])
    if window is not None:
        assert torch.equal(moved[..., -3:], window[..., -3:])


def prompted(model: Any, rows: int) -> Any:
    """The cache after prompts of six tokens; the last of the outputs, whatever its name."""
    return next(
        iter(reversed(model(torch.randint(VOCABULARY, (rows, 6)), use_cache=True).to_tuple()))
    )


def cached(layer: adapters.Adapter, cache: Any) -> tuple[Any, Any]:
    """The state and the window that transformers keeps."""
    if layer.shapes["mixer"] == "lightning":
        return cache.linear_cache[0], None
    return cache.layers[0].recurrent_states[0], cache.layers[0].conv_states[0]


@pytest.mark.parametrize("name", ["qwen3.5", "minimax"])
def test_a_cache_without_a_prompt_is_refused(name: str) -> None:
    from transformers import DynamicCache

    layer = adapters.adapt_model(build_tiny(name))[0]
    state = torch.zeros(1, 4, 16, 16)
    with pytest.raises(adapters.AdapterError, match="layer 0 holds no state; run the prompt"):
        layer.import_cache(DynamicCache(), state, None, torch.tensor([0]))


def test_a_cache_that_records_its_past_is_refused() -> None:
    model = build_tiny("qwen3.5")
    layer = adapters.adapt_model(model)[0]
    cache = prompted(model, 1)
    cache.layers[0].activate_past_recording()
    with pytest.raises(adapters.AdapterError, match="activate_past_recording"):
        layer.import_cache(cache, torch.zeros(1, 4, 16, 16), None, torch.tensor([0]))

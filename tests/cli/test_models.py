"""Shapes of published models: their states and factors are those of the published table."""

from pathlib import Path

import pytest

from bolegen.cli import main
from bolegen.ir import LayerSpec
from bolegen.models import MODELS, find_model

MIB = 1 << 20
GIB = 1 << 30
NODES = 100
# state, MiB a request; 100 nodes' snapshots, GiB, and P, K, U, MiB; times smaller
TABLE = {
    "qwen3-next-80b-a3b": ("72", "7.03", "84.8", "84.9"),
    "qwen3.5-4b": ("48", "4.69", "56.5", "84.9"),
    "qwen3.5-9b": ("48", "4.69", "56.5", "84.9"),
    "qwen3.5-27b": ("144", "14.06", "150.9", "95.4"),
    "qwen3.5-35b-a3b": ("60", "5.86", "70.7", "84.9"),
    "qwen3.5-122b-a10b": ("144", "14.06", "141.5", "101.8"),
    "qwen3.5-397b-a17b": ("180", "17.58", "176.9", "101.8"),
    "olmo-hybrid-7b": ("50.6", "4.94", "79.4", "63.8"),
    "kimi-linear-48b-a3b": ("40", "3.91", "93.8", "42.7"),
    "kimi-k3": ("414", "40.4", "970", "42.7"),
    "glm-5.3-flash": ("136", "13.3", "318.8", "42.7"),
    "ling-v3": ("70", "6.84", "164.1", "42.7"),
    "nemotron-h-8b": ("96", "9.38", "85.5", "112"),
    "nemotron-3-nano-30b-a3b": ("46", "4.49", "45.5", "101"),
    "nemotron-3-super-120b-a12b": ("160", "15.6", "142.6", "112"),
    "granite-4.0-h-small": ("144", "14.1", "116.0", "124"),
    "granite-4.0-h-tiny": ("54", "5.27", "44.6", "121"),
    "falcon-h1-34b": ("288", "28.1", "127.4", "226"),
    "falcon-h1-7b": ("132", "12.9", "56.3", "235"),
    "minimax-text-01": ("280", "27.3", "437.5", "64"),
    "minimax-m1": ("280", "27.3", "437.5", "64"),
    "ling-2.5-1t": ("280", "27.3", "437.5", "64"),
    "ring-2.5-1t": ("280", "27.3", "437.5", "64"),
    "ring-flash-linear-2.0": ("56", "5.47", "87.5", "64"),
}
MIXERS = {
    "olmo": "gdn_neg", "qwen": "gdn", "nemo": "mamba2", "gran": "mamba2", "falc": "mamba2",
    "kimi": "kda", "glm-": "kda_bounded", "ling-v": "kda_bounded",
}  # fmt: skip


def printed(value: float, digits: str) -> str:
    """``value`` with as many decimals as ``digits`` has."""
    return f"{value:.{len(digits.partition('.')[2])}f}"


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_table(name: str) -> None:
    model = find_model(name)
    spec = LayerSpec(
        model.mixer, model.key_heads, model.value_heads, model.d_k, model.d_v, model.conv,
        factors="pku",
    )  # fmt: skip
    state = model.layers * spec.value_heads * spec.d_k * spec.d_v * 4
    rows = spec.row_bytes if spec.keeps_rows else 0
    factors = NODES * model.layers * (spec.factor_bytes - rows)
    snapshots = NODES * state
    sizes = (state / MIB, snapshots / GIB, factors / MIB, snapshots / factors)
    said = TABLE[name]
    assert tuple(printed(size, digits) for size, digits in zip(sizes, said, strict=True)) == said


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_mixer_and_plans(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [mixer for stem, mixer in MIXERS.items() if name.startswith(stem)] or ["lightning"]
    assert [find_model(name).mixer.name] == known
    assert main(["plan", "--template", "(2)", "--model", name]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"1 request of 3 nodes in {find_model(name).layers} layers")
    assert err == ""


def test_a_models_mixer_is_compiled_unless_another_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = ("compile", "--template", "(2)", "--out", str(tmp_path))
    model = ("--model", "granite-4.0-h-tiny")
    assert main([*compiled, *model]) == 0
    assert main([*compiled, *model, "--mixer", "mamba2"]) == 0
    assert main([*compiled, "--mixer", "lightning"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*compiled, *model, "--mixer", "deltanet"]) == 0
    said = "bolegen: granite-4.0-h-tiny has mamba2; --mixer deltanet is taken\n"
    assert capsys.readouterr().err == said
    kinds = sorted(path.name.partition("_2_")[0] for path in tmp_path.iterdir())
    assert kinds == ["deltanet", "lightning", "mamba2"]

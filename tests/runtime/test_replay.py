"""A dumped round is run again from its file alone: the same bits, and a verdict."""

import pickle
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bolegen.codegen import compile_template, write_module
from bolegen.ir import LayerSpec
from bolegen_runtime import (
    LayerWeights,
    LoadError,
    RoundDump,
    Settings,
    capture_round,
    load,
    load_round,
    save_round,
)
from bolegen_runtime.replay import find_module, main, replay_round
from support.rounds import make_round

LAYERS = 2
SMALL: dict[str, Any] = {"heads": (1, 2), "dims": (16, 16), "conv": 3}
TREES = [[-1, 0, 1, 1, 3], [-1, 0, 0, 2, 2], [-1, 0, 1, 2, 3]]
LONG = "parents:[-1" + ",0" * 39 + "]"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", "off")
    monkeypatch.delenv("BOLEGEN_GENERATED_DIR", raising=False)
    monkeypatch.setenv("BOLEGEN_CHECKED", "1")  # which a replay must not be


@cache
def module(template: str, **options: Any) -> ModuleType:
    return load(template, **SMALL, **options, settings=Settings())


@cache
def dumped(template: str = "(2,1)", *, bias: bool = False, **options: Any) -> RoundDump:
    """A round of three requests, one of them padded, verified and committed."""
    m = module(template, **options)
    trees: dict[str, Any] = {}
    if m.MODULE.parents is None:
        trees = {"trees": TREES, "nodes": 5}
    r = make_round(m, batch=3, layers=LAYERS, slots=9, bias=bias, **trees)
    r.slots = torch.tensor([7, -1, 2])
    factors = m.allocate(3, LAYERS, "cpu")
    out = torch.stack([r.verify(m, factors, layer) for layer in range(LAYERS)])
    biases = [None] * LAYERS if r.conv_bias is None else list(r.conv_bias)
    given = zip(r.conv_weight, r.A_log, r.dt_bias, biases, strict=True)
    dump = capture_round(
        m, [LayerWeights(*of) for of in given], r.state, r.conv_state, r.x, r.a, r.b, r.slots,
        out, parents=r.parents, live=r.live,
    )  # fmt: skip
    last = torch.tensor([4, 0, 3])
    m.commit(factors, r.state, r.conv_state, r.slots, last)
    return dump.with_commit(last, r.state, r.conv_state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"template": "any:6", "depth": 4, "bias": True},
        {"template": LONG, "factors": "pku"},
        {"template": "chain:4", "solver": "substitution", "dtype": "fp32"},
        {"dtype": "fp16", "state_dtype": "bf16", "depth": 6},
    ],
    ids=lambda options: "-".join(map(str, options.values()))[:40] or "plain",
)
def test_a_round_replays_bit_for_bit_from_its_file(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "round.pt"
    save_round(dumped(**options), path)
    assert [each.name for each in tmp_path.iterdir()] == ["round.pt"]
    assert main([str(path), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[4:]]
    assert [row[:2] for row in rows] == [
        [str(layer), what] for whats in (("out", "rows"), ("state", "window"))
        for layer in range(LAYERS) for what in whats
    ]  # fmt: skip
    assert all(row[2] in ("equal", "-") for row in rows)
    assert sum(row[2] == "equal" for row in rows) == 3 * LAYERS
    assert all(float(row[3]) <= 1 for row in rows)
    assert "(slot 7)" in "".join(lines) or "(slot 2)" in "".join(lines)


def test_only_the_slots_of_the_round_are_kept_and_all_comes_back(tmp_path: Path) -> None:
    dump = dumped()
    assert dump.engine_slots.tolist() == [2, 7]
    assert dump.slots.tolist() == [1, -1, 0]
    assert dump.state.shape[1] == dump.conv_state.shape[1] == 2
    save_round(dump, tmp_path / "r")
    again = load_round(tmp_path / "r")
    for field in fields(RoundDump):
        one, other = getattr(dump, field.name), getattr(again, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_round_that_was_not_committed_replays_verify_alone() -> None:
    dump = replace(dumped(), last_node=None, new_state=None, new_conv_state=None)
    found = replay_round(dump, find_module(dump.record), CPU)
    assert {each.what for each in found} == {"rows", "out"}


@pytest.mark.parametrize("name", ["out", "new_state", "new_conv_state"])
def test_other_bits_on_the_same_device_fail(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = getattr(dumped(), name).clone()
    changed[1, 0].flatten()[5] += 0.5
    dump = replace(dumped(), **{name: changed})
    save_round(dump, tmp_path / "r")
    assert main([str(tmp_path / "r"), "--device", "cpu"]) == 1
    assert "1 differ" in capsys.readouterr().out
    # elsewhere they may differ, within the contract
    save_round(replace(dump, made_on="another GPU"), tmp_path / "r")
    assert main([str(tmp_path / "r"), "--device", "cpu"]) == 0


def test_a_module_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    m = find_module(dumped().record)
    right = m.verify

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = right(*args, **kwargs) * 1.02
        return out

    monkeypatch.setattr(m, "verify", wrong)
    found = replay_round(dumped(), m, CPU)
    assert all(each.ratio > 1 and each.differ for each in found if each.what == "out")


def test_a_foreign_module_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {**dumped().record, "digest": "0123456789abcdef"}
    save_round(replace(dumped(), record=record), tmp_path / "r")
    assert main([str(tmp_path / "r"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "digest 0123456789abcdef, and what is compiled here gives has digest" in said
    assert said.count("\n") == 1
    # the right digest in a file of another module
    other = write_module(compile_template("(2)", LayerSpec(d_k=16, d_v=16)), tmp_path)
    with pytest.raises(LoadError, match=r"and what .*gdn_2_d1.*\.py gives has digest"):
        find_module(dumped().record, other)


def test_the_module_may_be_named(tmp_path: Path) -> None:
    spec = LayerSpec(key_heads=1, value_heads=2, d_k=16, d_v=16, conv=3)
    path = write_module(compile_template("(2,1)", spec), tmp_path)
    save_round(dumped(), tmp_path / "r")
    assert main([str(tmp_path / "r"), "--device", "cpu", "--module", str(path)]) == 0


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def test_a_file_of_something_else_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r"
    save_round(dumped(), path)
    whole = path.read_bytes()
    content = {field.name: getattr(dumped(), field.name) for field in fields(RoundDump)}
    for bad in (b"", b"not a round", whole[: len(whole) // 2], pickle.dumps(Bomb())):
        path.write_bytes(bad)
        with pytest.raises(LoadError, match="is not a round"):
            load_round(path)
    damages: dict[str, tuple[Any, str | None]] = {
        "format": (2, "of format 1"), "x": (None, "x: expected Tensor, got NoneType"),
        "state": (torch.zeros(3), "state: expected"), "extra": (1, "look at extra"),
        "record": ({}, None), "slots": (torch.tensor([9, 9, 9]), None),
        "live": (torch.ones(3, 4, dtype=torch.bool), "live: expected"),
    }  # fmt: skip
    for name, (value, said) in damages.items():
        torch.save({"format": 1, **content, name: value}, path)
        assert main([str(path), "--device", "cpu"]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert said is None or said in printed
    torch.save({"format": 1, **content, "x": Bomb()}, path)
    assert main([str(path), "--device", "cpu"]) == 2
    assert main([str(tmp_path / "missing")]) == 2
    assert not (tmp_path / "exploded").exists()


def test_a_convolution_bias_is_of_all_layers_or_none() -> None:
    m, r = module("(2,1)"), make_round(module("(2,1)"), layers=LAYERS, bias=True)
    weights = [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)]
    assert r.conv_bias is not None
    weights[1] = replace(weights[1], conv_bias=r.conv_bias[1])
    with pytest.raises(ValueError, match="all or none with a conv_bias, got 1"):
        capture_round(m, weights, r.state, r.conv_state, r.x, r.a, r.b, r.slots, r.x)

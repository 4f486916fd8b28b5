"""Damaged files: an error that names the file, or what was saved."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bolegen.codegen import EmittedModule, compile_template
from bolegen.ir import LayerSpec
from bolegen_runtime import (
    KernelCache,
    LoadError,
    Profile,
    ProfileEntry,
    ProfileError,
    Request,
    RoundDump,
    Settings,
    capture_round,
    list_entries,
    load,
    load_profile,
    load_round,
    save_round,
)
from bolegen_runtime.budget import Environment
from bolegen_runtime.replay import replay_round
from examples.tree_decoding.record import Round, read_rounds, write_rounds
from support.scene_parts import module
from support.scenes import SCENES
from support.spoils import OURS, bits_of

KEY, COMPILER = "ab" * 32, "cd" * 8
SPEC = LayerSpec(key_heads=1, value_heads=1, d_k=16, d_v=16)
ENTRY = ProfileEntry(4, 100, "t", 0.1, 10.0, (4, 16), (10.0, 12.0), (9.0, 9.0), (11.0, 19.0))
OPTIONAL = {"conv_bias", "parents", "live", "last_node", "new_state", "new_conv_state"}
FEW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def damage(data: bytes, how: tuple[str, int, int]) -> bytes:
    """A byte changed, dropped or put in, the rest cut off, or a part of it twice."""
    kind, at, value = how
    at %= len(data)
    after = {"flip": bytes([data[at] ^ (value or 1)]) + data[at + 1 :], "cut": b"",
             "drop": data[at + 1 :], "put": bytes([value]) + data[at:],
             "twice": data[at // 2 :]}  # fmt: skip
    return data[:at] + after[kind]


@contextmanager
def suppress_named(path: Path) -> Iterator[None]:
    said = path.name
    try:
        yield
    except OURS as error:
        said = str(error)
    assert path.name in said


damages = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "put", "twice"]),
    st.integers(0, 1 << 20), st.integers(0, 255),
)  # fmt: skip


def expect_refused_or_same(path: Path, data: bytes, read: Callable[[], Any], want: Any) -> None:
    path.write_bytes(data)
    with suppress_named(path):
        assert bits_of(read()) == bits_of(want)


@FEW
@given(damages)
def test_a_damaged_profile_is_refused_or_what_was_saved(
    tmp_path: Path, how: tuple[str, int, int]
) -> None:
    path = tmp_path / "profile.json"
    profile = Profile(Environment.current("cpu"), {"model": "tiny"}, (ENTRY,))
    profile.save(path)
    data = damage(path.read_bytes(), how)
    expect_refused_or_same(path, data, lambda: load_profile(path, device="cpu"), profile)


odd = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@FEW
@given(st.sampled_from(["format", "environment", "target", "entries", "digest"]), odd)
def test_a_profile_of_other_json_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "profile.json"
    Profile(Environment.current("cpu"), {}, (ENTRY,)).save(path)
    whole = path.read_text()
    for at in range(3):
        found = json.loads(whole)
        (found, found["entries"][0], found["environment"])[at][name] = value
        path.write_text(json.dumps(found))
        if found != json.loads(whole):
            with pytest.raises(ProfileError, match=path.name):
                load_profile(path, device="cpu")


@cache
def dumped() -> RoundDump:
    scene = SCENES["capture_round"]("cpu")
    return capture_round(**scene.given)


@FEW
@given(damages)
def test_a_damaged_round_is_refused_or_what_was_saved(
    tmp_path: Path, how: tuple[str, int, int]
) -> None:
    path = tmp_path / "round.pt"
    save_round(dumped(), path)
    data = damage(path.read_bytes(), how)
    expect_refused_or_same(path, data, lambda: load_round(path), dumped())


@FEW
@given(st.sampled_from(sorted(vars(dumped()))), odd)
def test_a_round_with_another_field_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "round.pt"
    changed = vars(dumped()) | {name: value}
    torch.save({"format": 1, **changed}, path)
    taken = name == "made_on" and isinstance(value, str)
    if taken or (value is None and name in OPTIONAL):
        assert bits_of(load_round(path)) == bits_of(changed)
        return
    with pytest.raises(LoadError, match=rf"round\.pt.*{name}"):
        load_round(path)


@pytest.mark.parametrize("name", ["x", "a", "out", "slots", "state", "A_log"])
@pytest.mark.parametrize("change", [lambda x: x[:1, :0], lambda x: x.to(torch.int8)])
def test_a_round_that_does_not_fit_is_not_replayed(name: str, change: Any) -> None:
    wrong = dumped()
    wrong = RoundDump(**vars(wrong) | {name: change(getattr(wrong, name)[None])})
    with pytest.raises(ValueError, match=rf"\b({name}|a)\b"):
        replay_round(wrong, module(), torch.device("cpu"))


@cache
def emitted() -> EmittedModule:
    return compile_template("(2)", SPEC)


@FEW
@given(damages, st.booleans())
def test_a_damaged_entry_is_built_again(
    tmp_path: Path, how: tuple[str, int, int], record: bool
) -> None:
    store = KernelCache(tmp_path / "cache", COMPILER)
    text, path = store.get(KEY, lambda: ("m", "a module"), request={"a": 1})
    assert path is not None
    target = store.folder / f"{KEY}.json" if record else path
    whole = target.read_bytes()
    target.write_bytes(damage(whole, how))
    list_entries(store.root)
    assert store.get(KEY, lambda: ("m", "a module"), request={"a": 1})[0] == text
    target.write_bytes(whole)


@pytest.mark.parametrize("key", [None, 3, "x", "../" + "a" * 61, b"ab"])
def test_a_cache_takes_digests_alone(tmp_path: Path, key: Any) -> None:
    store = KernelCache(tmp_path / "cache", COMPILER)
    with pytest.raises(ValueError, match="key: expected"):
        store.get(key, lambda: ("m", ""), request={})
    with pytest.raises(ValueError, match="compiler: expected"):
        KernelCache(tmp_path, key)
    with pytest.raises(ValueError, match="request: expected"):
        store.get(KEY, lambda: ("m", ""), request={"a": object()})
    assert not store.root.exists()


@FEW
@given(damages, st.booleans())
def test_a_damaged_generated_module_is_not_run(
    tmp_path: Path, how: tuple[str, int, int], in_record: bool
) -> None:
    path = tmp_path / f"{emitted().name}.py"
    data = emitted().text.encode()
    at = data.index(b"MODULE = Module(") if in_record else 0
    size = 900 if in_record else len(data)
    kind, place, value = how
    data = damage(data, (kind, at + place % size, value))
    request = Request("(2)", heads=(1, 1), dims=(16, 16))
    where = Settings(generated_dir=tmp_path)

    def read() -> Any:
        options = {"heads": request.heads, "dims": request.dims, "depth": request.depth}
        return load("(2)", settings=where, **options).MODULE.digest  # type: ignore[arg-type]

    load.__globals__["_loaded"].clear()
    expect_refused_or_same(path, data, read, emitted().digest)


@FEW
@given(damages)
def test_a_damaged_recording_is_refused_or_read(tmp_path: Path, how: tuple[str, int, int]) -> None:
    path = tmp_path / "rounds.jsonl"
    write_rounds(path, {"parents": [-1, 0]}, [Round(0, (1, 2), (1.0, 0.5), (0, 1), 7)])
    path.write_bytes(damage(path.read_bytes(), how))
    with suppress_named(path):
        read_rounds(path)

"""One round in one file: what verify and commit were given and gave, to be run again elsewhere.

A file is read by torch's weights-only loader: tensors, numbers and strings, nothing that runs.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from bolegen_runtime.arguments import (
    INTEGERS,
    expect_device,
    expect_kind,
    expect_module,
    expect_path,
    expect_tensor,
)
from bolegen_runtime.lifetimes import CanonicalState, LayerWeights
from bolegen_runtime.record import LoadError

__all__ = [
    "RoundDump",
    "capture_round",
    "check_dump",
    "describe_device",
    "load_round",
    "save_round",
]

FORMAT = 1
Tensor = torch.Tensor


@dataclass(frozen=True)
class RoundDump:
    """A round of L layers and B requests, on the host.

    record: the module's MODULE, dtypes by name. made_on: device and versions. x [L, B, n, C], a
    and b [L, B, n, Hv], out [L, B, n, Hv, d_v]; conv_weight [L, C, W], conv_bias [L, C] or None,
    A_log and dt_bias [L, Hv]. state [L, S, Hv, d_v, d_k] and conv_state [L, S, C, W-1]: the S
    slots that the round uses; slots [B] are places in them, engine_slots [S] what the engine
    calls them. parents and live [B, n] or None. After a commit: last_node [B], new_state and
    new_conv_state as state and conv_state; before, None.
    """

    record: dict[str, Any]
    made_on: str
    x: Tensor
    a: Tensor
    b: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    conv_state: Tensor
    slots: Tensor
    engine_slots: Tensor
    parents: Tensor | None
    live: Tensor | None
    out: Tensor
    last_node: Tensor | None = None
    new_state: Tensor | None = None
    new_conv_state: Tensor | None = None

    def to(self, device: torch.device) -> RoundDump:
        """The same round on a device."""
        device = expect_device(device)
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def with_commit(self, last_node: Tensor, state: Tensor, conv_state: Tensor) -> RoundDump:
        """The round with what commit left in the engine's pools; last_node [B] as it took it.

        Raises ValueError, which names the argument.
        """
        expect_tensor("last_node", last_node, tuple(self.slots.shape), INTEGERS, None)
        _check_pools(state, conv_state, self.engine_slots.tolist(), last_node.device)
        dump = replace(
            self,
            last_node=last_node.cpu().clone(),
            new_state=_pick(state, self.engine_slots),
            new_conv_state=_pick(conv_state, self.engine_slots),
        )
        check_dump(dump)
        return dump


def capture_round(
    module: ModuleType,
    weights: Sequence[LayerWeights],
    state: Tensor,
    conv_state: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    parents: Tensor | None = None,
    live: Tensor | None = None,
) -> RoundDump:
    """Copy a round that was verified and not yet committed; waits for the device.

    Arguments as of a GraphPool and its verify, a layer first: x [L, B, n, C], state
    [L, slots, Hv, d_v, d_k]; of the pools only the slots of this round are copied. Raises
    ValueError, which names the argument.
    """
    expect_module(module)
    expect_kind("x", x, Tensor)
    expect_tensor("slots", slots, (None,), INTEGERS, x.device)
    here = [] if slots.is_meta else slots.tolist()
    used = sorted({slot for slot in here if slot >= 0})
    place = {slot: i for i, slot in enumerate(used)}
    engine_slots = torch.tensor(used, dtype=torch.int64)
    _check_pools(state, conv_state, used, x.device)
    given = {"x": x, "a": a, "b": b, "out": out, "parents": parents, "live": live}
    for name, each in given.items():
        if each is not None or name not in ("parents", "live"):
            expect_kind(name, each, Tensor)
            assert each is not None
            expect_tensor(name, each, (None,) * each.dim(), (each.dtype,), x.device)
    biases = _check_weights(weights)
    dump = RoundDump(
        record={name: _plain(value) for name, value in asdict(module.MODULE).items()},
        made_on=describe_device(x.device),
        x=_copy(x),
        a=_copy(a),
        b=_copy(b),
        conv_weight=_stack(weights, "conv_weight"),
        conv_bias=torch.stack(biases).cpu() if biases else None,
        A_log=_stack(weights, "A_log"),
        dt_bias=_stack(weights, "dt_bias"),
        state=_pick(state, engine_slots),
        conv_state=_pick(conv_state, engine_slots),
        slots=torch.tensor([place.get(slot, -1) for slot in here]),
        engine_slots=engine_slots,
        parents=None if parents is None else _copy(parents),
        live=None if live is None else _copy(live),
        out=_copy(out),
    )
    check_dump(dump)
    return dump


def save_round(dump: RoundDump, path: Path) -> None:
    """Write the file, whole or not at all; an older one is replaced."""
    expect_kind("dump", dump, RoundDump)
    path = expect_path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    content = {field.name: getattr(dump, field.name) for field in fields(dump)}
    try:
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, **content}, file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_round(path: Path) -> RoundDump:
    """Read a file of save_round; nothing in it is run. Raises LoadError for any other."""
    path = expect_path(path)
    try:
        with zipfile.ZipFile(path) as archive:  # torch looks at no checksum
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"{damaged} has changed since it was written")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a damaged archive makes of the loader
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(f"{path} is not a round that save_round wrote: {said}") from error
    if not isinstance(content, dict) or repr(content.pop("format", None)) != repr(FORMAT):
        raise LoadError(f"{path} is not a round of format {FORMAT}, which this version reads")
    wanted = {field.name: str(field.type) for field in fields(RoundDump)}
    if set(content) != set(wanted):
        odd = ", ".join(sorted(map(str, set(content) ^ set(wanted))))
        raise LoadError(f"{path} is not a round that save_round wrote: look at {odd}")
    for name, value in content.items():
        kind = {"record": dict, "made_on": str}.get(name, Tensor)
        if not isinstance(value, kind) and ("None" not in wanted[name] or value is not None):
            raise LoadError(
                f"{path}: {name}: expected {kind.__name__}, got {type(value).__name__}"
            )
    dump = RoundDump(**content)
    try:
        check_dump(dump)
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from error
    return dump


def check_dump(dump: RoundDump) -> None:
    """Every tensor fits the others and the record. Raises ValueError, which names one."""
    r = dump.record
    try:
        (key_heads, heads), (d_k, d_v), width = r["heads"], r["dims"], r["conv"]
        dtype, stored = (getattr(torch, r[name]) for name in ("dtype", "state_dtype"))
        channels = 2 * key_heads * d_k + heads * d_v
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"record: expected that of a generated module: {error!r}") from error
    slots = dump.engine_slots.numel()
    expect_tensor("x", dump.x, (None, None, None, channels), (dtype,), None)
    layers, rows, nodes = dump.x.shape[:3]
    gates, gate = (layers, rows, nodes, heads), (dtype, torch.float32)
    state = (layers, slots, heads, d_v, d_k), (stored,)
    window = (layers, slots, channels, width - 1), (dtype,)
    for name, (shape, dtypes) in {
        "a": (gates, gate), "b": (gates, gate), "out": ((*gates, d_v), (dtype,)),
        "conv_weight": ((layers, channels, width), (dtype,)),
        "conv_bias": ((layers, channels), (dtype,)),
        "A_log": ((layers, heads), gate), "dt_bias": ((layers, heads), gate),
        "state": state, "conv_state": window, "new_state": state, "new_conv_state": window,
        "slots": ((rows,), INTEGERS), "engine_slots": ((slots,), INTEGERS),
        "parents": ((rows, nodes), INTEGERS), "live": ((rows, nodes), (torch.bool,)),
        "last_node": ((rows,), INTEGERS),
    }.items():  # fmt: skip
        value = getattr(dump, name)
        if value is not None:
            expect_tensor(name, value, shape, dtypes, dump.x.device)


def _check_pools(state: Any, conv_state: Any, used: Sequence[int], device: torch.device) -> None:
    """What is copied from the engine's pools is there, and is not on meta."""
    pools = CanonicalState(state, conv_state)
    expect_kind("conv_state", conv_state, Tensor)
    if pools.state.device != device or device.type == "meta":
        raise ValueError(f"state: expected contents on {device}, got {pools.state.device}")
    if used and used[-1] >= pools.state.shape[1]:
        raise ValueError(f"slots: expected below {pools.state.shape[1]}, got {used[-1]}")


def _check_weights(weights: Sequence[LayerWeights]) -> list[Tensor]:
    """Layers that can be stacked; their biases."""
    if not isinstance(weights, Sequence) or not all(isinstance(w, LayerWeights) for w in weights):
        raise ValueError("weights: expected one LayerWeights a layer")
    biases = [w.conv_bias for w in weights if w.conv_bias is not None]
    if not weights or len(biases) not in (0, len(weights)):
        raise ValueError(f"weights: expected all or none with a conv_bias, got {len(biases)}")
    for name, first in vars(weights[0]).items():
        if first is not None:
            expect_kind(name, first, Tensor)
            for each in weights:
                held = getattr(each, name)
                expect_tensor(name, held, tuple(first.shape), (first.dtype,), first.device)
        if isinstance(first, Tensor) and first.is_meta:
            raise ValueError(f"{name}: expected contents, got a tensor on meta")
    return biases


def _stack(weights: Sequence[LayerWeights], name: str) -> Tensor:
    """One of the layers' constants, on the CPU; a dump holds rounds of mixers that have it."""
    held = [getattr(each, name) for each in weights]
    if not all(isinstance(each, Tensor) for each in held):
        raise ValueError(f"weights: expected {name} in every layer: dumps are of mixer gdn")
    return torch.stack(held).cpu()


def describe_device(device: torch.device) -> str:
    """What equal bits can be expected of: the device, torch and Triton."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, Triton {triton.__version__}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _pick(pool: Tensor, slots: Tensor) -> Tensor:
    return pool[:, slots.to(pool.device)].cpu()


def _plain(value: object) -> object:
    """A field of MODULE as a number, a string, None or a list of them."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value

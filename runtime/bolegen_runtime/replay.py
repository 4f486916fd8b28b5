"""Run a dumped round again: ``python -m bolegen_runtime.replay FILE``.

Prints, layer by layer, whether the bits are those of the dump and how far the results are from
the recurrence. The exit code is 1 where they are beyond the contract, or where bits differ on a
device and versions that are those of the dump; 2 for a file that cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime.arguments import expect_device, expect_kind
from bolegen_runtime.contract import (
    Finding,
    LayerRound,
    measure_commit,
    measure_verify,
    read_trees,
    refuse_unbounded,
)
from bolegen_runtime.dumps import RoundDump, check_dump, describe_device, load_round
from bolegen_runtime.loader import DTYPES, chosen_solver, load
from bolegen_runtime.record import LoadError, import_text
from bolegen_runtime.reference import Tree
from bolegen_runtime.settings import Settings

__all__ = ["Replayed", "find_module", "main", "replay_round"]


@dataclass(frozen=True)
class Replayed:
    """One quantity of one layer: elements whose bits differ from the dump, None where it has no
    such quantity, and the largest error over its limit, None where there was nothing to measure.
    """

    layer: int
    what: str
    differ: int | None
    worst: Finding | None

    @property
    def ratio(self) -> float:
        """Error over limit; at most 1 is within the contract."""
        return 0.0 if self.worst is None else self.worst.ratio


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one file; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(prog="bolegen_runtime.replay", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--module", type=Path, metavar="PY", help="the generated module to run")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    options = parser.parse_args(arguments)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dump = load_round(options.file)
        found = replay_round(dump, find_module(dump.record, options.module), device)
    except (LoadError, ValueError, OSError, RuntimeError, AssertionError) as error:
        print(f"bolegen: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    here = describe_device(device)
    print(f"module    {dump.record['name']}, digest {dump.record['digest']}")
    print(f"dumped    {dump.made_on}\nreplayed  {here}")
    print(f"{'layer':>5}  {'what':8}{'bits':>12}  error / limit, where it is largest")
    for each in found:
        bits = {None: "-", 0: "equal"}.get(each.differ, f"{each.differ} differ")
        print(f"{each.layer:>5}  {each.what:8}{bits:>12}  {each.ratio:.3f}  {each.worst or ''}")
    differs = here == dump.made_on and any(each.differ for each in found)
    return 1 if differs or any(each.ratio > 1 for each in found) else 0


def find_module(record: dict[str, Any], path: Path | None = None) -> ModuleType:
    """The module that a dump is of: the file ``path``, else loaded or compiled as `load` does.

    Raises LoadError where its digest is another.
    """
    if path is not None:
        try:
            module = import_text(path.read_text("utf-8"), path)
        except UnicodeDecodeError as error:
            raise LoadError(f"{path} is not what the compiler wrote: {error}") from error
    else:
        module = load(**_request(record), settings=_unchecked(Settings.from_env()))
    if module.MODULE.digest != record.get("digest"):
        raise LoadError(
            f"the round is of {record.get('name')}, digest {record.get('digest')}, and what "
            f"{path or 'is compiled here'} gives has digest {module.MODULE.digest}; replay it "
            "with the bolegen that dumped it, or name the module's file with --module"
        )
    return module


def replay_round(dump: RoundDump, module: ModuleType, device: torch.device) -> list[Replayed]:
    """Verify, and commit where the dump did, on ``device``; every quantity of every layer.

    Raises ValueError for a module without bounds, and as its verify does.
    """
    expect_kind("dump", dump, RoundDump)
    refuse_unbounded(module)
    check_dump(dump)
    device = expect_device(device)
    d = dump.to(device)
    factors = module.allocate(d.x.shape[1], d.x.shape[0], device)
    trees = read_trees(module, d.slots.tolist(), d.x.shape[2], d.parents, d.live)
    found, rounds = [], []
    for layer in range(d.x.shape[0]):
        r, out = _verify(module, d, factors, layer, trees)
        measured = measure_verify(module, r, d.state[layer], d.conv_state[layer], out)
        found += _collect(layer, measured, {"out": _differ(out, d.out[layer])})
        rounds.append(r)
    if d.last_node is None or d.new_state is None or d.new_conv_state is None:
        return [_rename(each, d.engine_slots.tolist()) for each in found]
    state, conv_state = d.state.clone(), d.conv_state.clone()
    module.commit(factors, state, conv_state, d.slots, d.last_node)
    for layer, r in enumerate(rounds):
        differ = {
            "state": _differ(state[layer], d.new_state[layer]),
            "window": _differ(conv_state[layer], d.new_conv_state[layer]),
        }
        after = state[layer], conv_state[layer]
        found += _collect(layer, _judge_commit(module, r, d, after), differ)
    return [_rename(each, d.engine_slots.tolist()) for each in found]


def _verify(
    m: ModuleType, d: RoundDump, factors: Any, layer: int, trees: Sequence[Tree]
) -> tuple[LayerRound, torch.Tensor]:
    """Run one layer as it was run; what it was given, and its outputs."""
    bias = None if d.conv_bias is None else d.conv_bias[layer]
    x, a, b = d.x[layer], d.a[layer], d.b[layer]
    weight, gates = d.conv_weight[layer], (d.A_log[layer], d.dt_bias[layer])
    out = m.verify(
        x, a, b, weight, *gates, d.state[layer], d.conv_state[layer], d.slots, factors,
        layer=layer, conv_bias=bias, parents=d.parents, live=d.live,
    )  # fmt: skip
    rows = factors.convolved_rows(layer)[: x.shape[0], : x.shape[1]].clone()
    return LayerRound(layer, x, rows, a, b, weight, bias, *gates, d.slots.tolist(), trees), out


def _judge_commit(
    m: ModuleType, r: LayerRound, d: RoundDump, after: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[Finding]:
    last = [] if d.last_node is None else d.last_node.tolist()
    for row, (slot, node) in enumerate(zip(r.slots, last, strict=True)):
        if slot >= 0 and r.trees[row].path(node):
            before = d.state[r.layer, slot], d.conv_state[r.layer, slot]
            pools = before, (after[0][slot], after[1][slot])
            yield from measure_commit(m, r, row, node, slot, pools)


def _collect(layer: int, measured: Iterable[Finding], differ: dict[str, int]) -> list[Replayed]:
    """The worst of each quantity, and those of which there are bits alone."""
    worst: dict[str, Finding | None] = {}
    for finding in measured:
        known = worst.get(finding.what)
        if known is None or finding.ratio > known.ratio:
            worst[finding.what] = finding
    worst = {**dict.fromkeys(differ), **worst}
    return [Replayed(layer, what, differ.get(what), of) for what, of in worst.items()]


def _rename(each: Replayed, engine_slots: list[int]) -> Replayed:
    """With the slot as the engine calls it."""
    if each.worst is None or each.worst.slot < 0:
        return each
    return replace(each, worst=replace(each.worst, slot=engine_slots[each.worst.slot]))


def _differ(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements that differ in any bit."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return int(one.contiguous().view(kind).ne(other.contiguous().view(kind)).sum())


def _request(record: dict[str, Any]) -> dict[str, Any]:
    """Arguments of load for a MODULE record; a template's spelling may be cut short in it."""
    spelled = {name: short for short, name in DTYPES.items()}
    try:
        parents = record["parents"]
        template = f"any:{int(record['nodes'])}"
        if parents is not None:
            template = f"parents:[{','.join(str(int(parent)) for parent in parents)}]"
        same = ("conv", "factors", "contract", "readout", "mixer", "depth")
        asked = {name: record[name] for name in same}
        asked |= {name: spelled[record[name]] for name in ("dtype", "state_dtype")}
        asked |= {name: tuple(record[name]) for name in ("heads", "dims")}
        return asked | {"template": template, "solver": chosen_solver(str(record["name"]))}
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"the dump's record of its module cannot be read: {error!r}") from error


def _unchecked(settings: Settings) -> Settings:
    """A replay is judged by itself."""
    return Settings(settings.cache_dir, settings.generated_dir)


if __name__ == "__main__":
    sys.exit(main())

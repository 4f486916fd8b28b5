"""Ways to spoil an argument; the call then names it and changes nothing, or is right."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from bolegen.errors import BolegenError
from bolegen_runtime import (
    CacheError,
    CheckedError,
    GraphError,
    LifetimeError,
    LoadError,
    ProfileError,
)

__all__ = [
    "OURS",
    "SPOILS",
    "WRONG",
    "Arguments",
    "Scene",
    "Spoiling",
    "attack",
    "bits_of",
    "spoiled",
]

OURS = (
    ValueError, BolegenError, CacheError, CheckedError, GraphError, LifetimeError, LoadError,
    ProfileError,
)  # fmt: skip
DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip

SPOILS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: None,
    "a number": lambda x: 3,
    "a list": lambda x: x.tolist(),
    "on meta": lambda x: x.to("meta"),
    "one axis less": lambda x: x[0] if x.dim() else x,
    "one axis more": lambda x: x[None],
    "no rows": lambda x: x[:0],
    "a row less": lambda x: x[:-1],
    "a row more": lambda x: torch.cat([x, x[:1]]),
    "no columns": lambda x: x[..., :0],
    "a column less": lambda x: x[..., :-1],
    "a column more": lambda x: torch.cat([x, x[..., :1]], -1),
    "axes swapped": lambda x: x.transpose(0, -1),
    "stored backwards": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "spaced out": lambda x: torch.stack([x, x], -1)[..., 0],
    "a column of a wider one": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "rows in one place": lambda x: x[:1].expand(x.shape),
    "columns in one place": lambda x: x[..., :1].expand(x.shape),
    "reshaped": lambda x: x.flatten(),
    "sparse": lambda x: x.to_sparse(),
    "on the CPU": lambda x: x.cpu(),
}
SPOILS |= {str(dtype): partial(torch.Tensor.to, dtype=dtype) for dtype in DTYPES}

# in place of what is no tensor
WRONG: dict[str, Any] = {
    "none": None, "true": True, "-1": -1, "a half": 0.5, "a fraction": 2.5, "nan": float("nan"),
    "infinite": float("inf"), "-infinite": float("-inf"), "1e400": 10**400, "complex": 2j,
    "words": "x", "digits": "2", "bytes": b"2", "empty words": "",
    "a list": [], "a pair": (0.5, "x"),
    "a dict": {}, "an object": object(), "a class": int, "a tensor": torch.zeros(2, 2),
    "a number of a tensor": torch.tensor(1), "a list of lists": [[0]],
}  # fmt: skip

Arguments = dict[str, Any]
Spoiling = list[tuple[str, str]]  # an argument, and the way it is spoiled


@dataclass
class Scene:
    """A call that is right as it stands.

    held: what a refused call must leave as it was, its arguments apart; a function is asked.
    writes: arguments that it writes. fine: by argument, whether something in place of what is no
    tensor is right as well. axes: arguments that may have another number of axes. says: other
    names its errors go by.
    """

    call: Callable[..., Any]
    given: Arguments
    held: tuple[Any, ...] = ()
    writes: tuple[str, ...] = ()
    fine: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()

    def holds(self) -> list[Any]:
        return [each() if callable(each) else each for each in self.held]


def bits_of(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """All that a value holds, to compare: tensors by bits, objects by their attributes."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout is not torch.strided:
            return str(value.layout), tuple(value.shape), str(value.dtype)
        whole = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        whole = whole.reshape(-1).view(torch.uint8)
        return tuple(value.shape), str(value.dtype), whole.numpy().tobytes()
    if id(value) in seen or isinstance(value, ModuleType | type):
        return "known"
    seen = seen | {id(value)}
    if isinstance(value, Mapping):
        return [(repr(k), bits_of(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [bits_of(each, seen) for each in value]
    if hasattr(value, "__dict__") and not callable(value):
        return bits_of(vars(value), seen)
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def spoiled(scene: Scene, pairs: int, most: int | None = None, seed: int = 0) -> list[Spoiling]:
    """Each argument in every way, then pairs of two arguments; ``most``: so many of all these.

    The same lists on every machine.
    """
    numbers = random.Random(seed)
    ways = {
        name: sorted(SPOILS if isinstance(value, torch.Tensor) else WRONG)
        for name, value in sorted(scene.given.items())
    }
    found: list[Spoiling] = [[(name, way)] for name in ways for way in ways[name]]
    for _ in range(pairs if len(ways) > 1 else 0):
        two = numbers.sample(list(ways), 2)
        found.append([(name, numbers.choice(ways[name])) for name in two])
    return found if most is None else numbers.sample(found, min(most, len(found)))


def attack(make: Callable[[], Scene], how: Spoiling) -> bool:
    """Whether the spoiled call was refused, as it must be; otherwise its answer was right.

    AssertionError, which names the spoiling, where neither is so.
    """
    try:
        return _is_refused(make, how)
    except Exception as error:
        raise AssertionError(f"{how}: {type(error).__name__}: {error}") from error


def _is_refused(make: Callable[[], Scene], how: Spoiling) -> bool:
    scene, plain = make(), make()
    for name, way in how:
        value = scene.given[name]
        is_tensor = isinstance(value, torch.Tensor)
        scene.given[name] = SPOILS[way](value) if is_tensor else WRONG[way]
    packed = {name: _packed(scene.given[name], plain.given[name]) for name, _ in how}
    before = bits_of((scene.given, scene.holds()))
    try:
        found = scene.call(**scene.given)
    except OURS as error:
        _expect_named(str(error), {*scene.given, *scene.says})
        assert bits_of((scene.given, scene.holds())) == before, "a refused call wrote something"
        return True
    _expect_rightly_taken(scene, plain, how)
    as_it_was = all(packed[name] is plain.given[name] for name in packed)
    answer, left, wrote = _answer_of(make) if as_it_was else _ask(plain, packed)
    assert bits_of(found) == answer, "the answer is not that of the same values"
    assert bits_of(scene.holds()) == left, "it left something else behind"
    for name in scene.writes:
        assert bits_of(scene.given[name]) == wrote[name], f"{name}: it wrote other values"
    return False


@cache
def _answer_of(make: Callable[[], Scene]) -> tuple[Any, Any, Arguments]:
    """The bits of the call as it stands, asked once for all spoilings that keep its values."""
    return _ask(make(), {})


def _ask(plain: Scene, changes: Arguments) -> tuple[Any, Any, Arguments]:
    """Bits of the answer, of what the call leaves in what is held, and of what it wrote."""
    given = plain.given | changes
    answer = bits_of(plain.call(**given))
    return answer, bits_of(plain.holds()), {name: bits_of(given[name]) for name in plain.writes}


def _expect_rightly_taken(scene: Scene, plain: Scene, how: Spoiling) -> None:
    for name, way in how:
        value, right = scene.given[name], plain.given[name]
        if not isinstance(right, torch.Tensor) or not isinstance(value, torch.Tensor | None):
            known = scene.fine.get(name)
            assert known is not None, f"{name}: {way} was taken for right"
            assert known(value), f"{name}: {way} was taken for right"
        elif value is not None and name not in scene.axes:
            assert value.dim() == right.dim(), f"{name}: {way} was taken for right"


def _packed(value: Any, right: Any) -> Any:
    """The same values as the call wants them stored: as they were, where they are the same."""
    if not isinstance(value, torch.Tensor) or not isinstance(right, torch.Tensor):
        return value
    same = value.shape == right.shape and value.layout is right.layout
    same = same and not value.is_meta and value.device == right.device
    if same and torch.equal(value.double(), right.double()):
        return right
    return value.clone(memory_format=torch.contiguous_format) if not value.is_sparse else value


def _expect_named(said: str, known: set[str]) -> None:
    """An error names an argument: at its start, or in its sentence."""
    assert known & set(re.findall(r"\w+", said)), f"{said!r} names none of {sorted(known)}"

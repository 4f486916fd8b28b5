"""What target passes cost on one device, and the node totals that follow; kept as a JSON file."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import triton

from bolegen_runtime.arguments import expect_device, expect_kind, expect_path, expect_whole

__all__ = ["Environment", "Profile", "ProfileEntry", "ProfileError", "load_profile"]

FORMAT = "bolegen-budget 1"
DECIMALS = 5  # of milliseconds in a file


class ProfileError(RuntimeError):
    """A profile that cannot be read, is of something else, or does not reach that far."""


@dataclass(frozen=True)
class Environment:
    """Where times were taken: they mean nothing anywhere else."""

    device: str
    capability: str
    torch_version: str
    triton_version: str

    @classmethod
    def current(cls, device: torch.device | str = "cuda") -> Environment:
        """Of this process, and of ``device``."""
        device = expect_device(device)
        name, capability = device.type, ""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        return cls(name, capability, str(torch.__version__), triton.__version__)

    def differences(self, other: Environment) -> list[str]:
        """What is not the same, in words."""
        expect_kind("other", other, Environment)
        return [
            f"{f.name} {getattr(self, f.name)!r} there and {getattr(other, f.name)!r} here"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True)
class ProfileEntry:
    """Milliseconds of whole passes of ``batch`` requests of at most ``context`` tokens.

    decode_ms: one-token decode. totals: nodes of the batch, roots included, ascending; median_ms,
    least_ms and most_ms: a tree pass over each. epsilon: the slowdown allowed.
    """

    batch: int
    context: int
    template: str
    epsilon: float
    decode_ms: float
    totals: tuple[int, ...]
    median_ms: tuple[float, ...]
    least_ms: tuple[float, ...]
    most_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        try:
            fits = self._fits()
            said = "expected ascending totals and a time above 0 for each"
        except (TypeError, OverflowError) as error:
            fits, said = False, str(error)
        if not fits:
            raise ProfileError(
                f"the entry of batch {self.batch!r:.40}, context {self.context!r:.40}, "
                f"{self.template!s:.40}: {said}"
            )

    def _fits(self) -> bool:
        rows = self.median_ms, self.least_ms, self.most_ms
        times = [self.decode_ms, *(ms for row in rows for ms in row)]
        _typed(self.template, str)
        for number in (self.batch, self.context, *self.totals):
            _typed(number, int)
        for time in (self.epsilon, *times):
            _typed(time, int, float)
        return (
            min(self.batch, self.context) >= 1
            and math.isfinite(self.epsilon)
            and self.epsilon >= 0
            and bool(self.totals)
            and all(a < b for a, b in zip((0, *self.totals), self.totals, strict=False))
            and all(len(row) == len(self.totals) for row in rows)
            and all(math.isfinite(t) and t > 0 for t in times)
        )

    @property
    def fitted_ms(self) -> tuple[float, ...]:
        """median_ms without noise: more nodes never take less time."""
        return fit_ascending(self.median_ms)

    @property
    def limit_ms(self) -> float:
        """The time that a pass may take."""
        return (1 + self.epsilon) * self.decode_ms

    @property
    def budget(self) -> int:
        """The largest total within limit_ms; 0 where there is none: decode plainly."""
        fitting = [ms <= self.limit_ms for ms in self.fitted_ms].count(True)
        return self.totals[fitting - 1] if fitting else 0

    @property
    def is_knee(self) -> bool:
        """Whether the budget was limited by time, and not by what was tried."""
        return self.budget < self.totals[-1]

    def cost_ms(self, total: int) -> float:
        """A pass over ``total`` nodes, between measured totals on the line between them.

        Below the least total it costs as much as that. ProfileError above the largest.
        """
        if expect_whole("total", total, 0) > self.totals[-1]:
            raise ProfileError(
                f"{total} nodes of batch {self.batch}, context {self.context}, {self.template}: "
                f"at most {self.totals[-1]} were measured; profile with more"
            )
        fitted = self.fitted_ms
        at = next(i for i, n in enumerate(self.totals) if n >= total)
        if at == 0:
            return fitted[0]
        low, high = self.totals[at - 1 : at + 1]
        share = (total - low) / (high - low)
        return fitted[at - 1] + share * (fitted[at] - fitted[at - 1])


@dataclass(frozen=True)
class Profile:
    """Entries by batch, context and template; ``target`` says what was measured, by name.

    target: facts that must hold where the profile is used, such as model and MODULE.digest.
    """

    environment: Environment
    target: Mapping[str, str]
    entries: tuple[ProfileEntry, ...]

    def __post_init__(self) -> None:
        expect_kind("environment", self.environment, Environment)
        for name, words in (("environment", vars(self.environment)), ("target", self.target)):
            _expect_words(name, words)
        for entry in self.entries if isinstance(self.entries, tuple) else [None]:
            expect_kind("entries", entry, ProfileEntry)

    def find(self, batch: int, context: int, template: str) -> ProfileEntry:
        """The smallest bucket that holds the batch and the context. ProfileError: none does."""
        batch, context = expect_whole("batch", batch, 0), expect_whole("context", context, 0)
        fitting = [
            e
            for e in self.entries
            if e.template == template and e.batch >= batch and e.context >= context
        ]
        if not fitting:
            have = sorted({(e.batch, e.context, e.template) for e in self.entries})
            raise ProfileError(
                f"no bucket holds batch {batch}, context {context}, {template}; have "
                + ", ".join(f"{b} x {c} {t}" for b, c, t in have)
            )
        return min(fitting, key=lambda e: (e.batch, e.context))

    def save(self, path: Path) -> None:
        """Write a JSON file, one line an entry, under a temporary name and then renamed."""
        path = expect_path(path)
        head = {"format": FORMAT, "environment": asdict(self.environment)}
        head["target"] = dict(self.target)
        entries = [_to_fields(entry) for entry in self.entries]
        head["digest"] = _digest({**head, "entries": entries})
        lines = [json.dumps(entry) for entry in entries]
        text = json.dumps(head, indent=1).removesuffix("\n}")
        text += ',\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, "utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def load_profile(
    path: Path,
    *,
    device: torch.device | str = "cuda",
    target: Mapping[str, str] | None = None,
) -> Profile:
    """Read what Profile.save wrote, for use on ``device``; ``target`` None: not compared.

    Raises ProfileError for a file that is truncated or something else, whose budgets do not follow
    from its times, that was changed since it was saved, or that was made on another device, with
    other versions, or of another target; it names what differs.
    """
    here = Environment.current(device)
    if target is not None:
        _expect_words("target", target)
    profile = _read(expect_path(path))
    wrong = profile.environment.differences(here)
    if target is not None:
        there = profile.target
        wrong += [
            f"{name} {there.get(name)!r} there and {target.get(name)!r} here"
            for name in sorted(there.keys() | target.keys())
            if there.get(name) != target.get(name)
        ]
    if wrong:
        raise ProfileError(f"{path}: profiled elsewhere: {'; '.join(wrong)}. Profile again")
    return profile


def fit_ascending(values: Sequence[float]) -> tuple[float, ...]:
    """The ascending values nearest to these, in least squares: pool adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] >= mean:
            other, size = pools.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))


_UNREADABLE = (KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _read(path: Path) -> Profile:
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: truncated, or no JSON: {error}. Profile again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ProfileError(f"{path}: no profile in the format {FORMAT!r}. Profile again")
    try:
        environment = Environment(**{k: _typed(v, str) for k, v in found["environment"].items()})
        target = {k: _typed(v, str) for k, v in found["target"].items()}
        entries = tuple(_from_fields(each) for each in _typed(found["entries"], list))
        digest = _digest(found)
    except (*_UNREADABLE, ProfileError) as error:
        raise ProfileError(f"{path}: not what was saved: {error}. Profile again") from error
    if digest != found.get("digest"):
        raise ProfileError(f"{path}: changed since it was saved. Profile again")
    return Profile(environment, target, entries)


def _digest(content: Mapping[str, Any]) -> str:
    """Of everything in a file but the digest itself: a digit that flips is seen."""
    kept = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


_NAMES = [field.name for field in fields(ProfileEntry)]


def _to_fields(entry: ProfileEntry) -> dict[str, Any]:
    """What a reader wants beside what a program needs."""
    return {**asdict(entry), "budget": entry.budget}


def _from_fields(found: Mapping[str, Any]) -> ProfileEntry:
    known: dict[str, Any] = {name: found[name] for name in _NAMES}
    rows = ("totals", "median_ms", "least_ms", "most_ms")
    entry = ProfileEntry(**known | {name: tuple(known[name]) for name in rows})
    unknown = found.keys() - {*_NAMES, "budget"}
    if unknown or found["budget"] != entry.budget:
        said = f"unknown {', '.join(sorted(unknown))}" if unknown else "its budget does not follow"
        raise ProfileError(f"batch {entry.batch}, context {entry.context}: {said}")
    return entry


def _expect_words(name: str, words: Any) -> None:
    pairs = words.items() if isinstance(words, Mapping) else [(None,)]
    if not all(isinstance(word, str) for pair in pairs for word in pair):
        raise ValueError(f"{name}: expected names and what they are in words, got {words!r:.60}")


def _typed(value: Any, *types: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"expected {' or '.join(t.__name__ for t in types)}, got {value!r}")
    return value

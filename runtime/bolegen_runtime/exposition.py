"""Histograms, and Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Family", "Histogram", "expose"]

Labels = Mapping[str, str]


class Histogram:
    """Counts by upper bound, the bound included, and one more above the last bound.

    ``counts``: whole numbers that were counted already, one for each bound.
    """

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = ()) -> None:
        self.bounds = tuple(bounds)
        self.counts = [*counts, *[0] * (len(self.bounds) + 1 - len(counts))]
        self.sum: float = sum(b * n for b, n in zip(self.bounds, self.counts, strict=False))

    def add(self, value: float) -> None:
        """Count one value."""
        place = next((i for i, bound in enumerate(self.bounds) if value <= bound), -1)
        self.counts[place] += 1
        self.sum += value

    def read(self) -> dict[str, Any]:
        """Buckets, each with all values up to its bound, their sum and their number."""
        buckets, total = {}, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets[bound] = total
        return {"buckets": buckets, "sum": self.sum, "count": total}


@dataclass(frozen=True)
class Family:
    """One metric: a number, a histogram as `Histogram.read` gives it, or numbers by reason."""

    name: str
    help: str
    value: Any

    @property
    def kind(self) -> str:
        """Its type in Prometheus."""
        return "counter" if self.name.endswith("_total") else "histogram"

    def samples(self, labels: Labels) -> list[str]:
        """Its lines for one set of labels."""
        if self.kind == "histogram":
            buckets = [
                _sample(f"{self.name}_bucket", {**labels, "le": _number(bound)}, count)
                for bound, count in self.value["buckets"].items()
            ]
            return [
                *buckets,
                _sample(f"{self.name}_sum", labels, self.value["sum"]),
                _sample(f"{self.name}_count", labels, self.value["count"]),
            ]
        if isinstance(self.value, dict):
            by = sorted(self.value.items())
            return [_sample(self.name, {**labels, "reason": reason}, n) for reason, n in by]
        return [_sample(self.name, labels, self.value)]


def expose(sources: Sequence[tuple[Labels, Sequence[Family]]]) -> str:
    """All families of all sources, each family in one group."""
    groups: dict[str, list[tuple[Labels, Family]]] = {}
    for labels, families in sources:
        for family in families:
            groups.setdefault(family.name, []).append((labels, family))
    lines = []
    for name, group in groups.items():
        lines += [f"# HELP {name} {group[0][1].help}", f"# TYPE {name} {group[0][1].kind}"]
        for labels, family in group:
            lines += family.samples(labels)
    return "".join(f"{line}\n" for line in lines)


def _sample(name: str, labels: Labels, value: float) -> str:
    said = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{said}}} {_number(value)}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value) if value % 1 else f"{value:.0f}"

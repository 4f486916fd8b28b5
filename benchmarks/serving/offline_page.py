"""What docs/evaluation.md says of decoding by batch and context, of every model's shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.records import count_nodes, name
from benchmarks.engine.shapes import SHAPES
from benchmarks.pages import table
from benchmarks.serving.offline import (
    MEANS,
    SPEEDS,
    check_offline,
    list_gains,
    list_left_out,
    list_speeds,
    speeds_of,
)
from benchmarks.serving.shares import SHARES, list_shares

__all__ = ["OFFLINE", "SHAPES", "draw_nodes", "write_chains", "write_shares"]

Records = list[dict[str, Any]]


def write_means(runs: dict[str, Records]) -> str:
    """Geometric means by shape and tree."""
    rows = []
    for shape, records in runs.items():
        check_offline(records)
        rows += [[shape.upper(), *row] for row in list_gains(records)]
    return table(["shapes of", *MEANS], rows)


def write_speeds(runs: dict[str, Records]) -> str:
    """Every point, what it was run on, the points that are not there, and the plot by nodes."""
    return "\n".join(
        f"{describe(shape, records)}\n\n{table(SPEEDS, list_speeds(records))}\n"
        f"{list_left_out(records)}\n\n![tokens a second over nodes in the batch]"
        f"(plots/offline-{shape}.svg)\n"
        for shape, records in runs.items()
    )


def write_chains(runs: dict[str, Records]) -> str:
    """Every point of chains and of trees by batch size, and what it was run on."""
    said = []
    for shape, records in runs.items():
        check_offline(records)
        said.append(f"{describe(shape, records)}\n\n{table(SPEEDS, list_speeds(records))}")
    return "\n".join(said)


def by_nodes(records: Records) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """By context and system: nodes in the batch, tokens a second."""
    speeds = speeds_of(records)
    held = [record for record in records if record["label"] in speeds]
    contexts = sorted({context for context, _ in speeds[records[0]["label"]]})
    return {
        at: {
            name(record): [
                (batch * count_nodes(record, batch), speed)
                for (context, batch), speed in speeds[record["label"]].items()
                if context == at
            ]
            for record in held
        }
        for at in contexts
    }


def draw_nodes(records: Records, path: Path) -> None:
    """The same as a plot, a panel a context."""
    from benchmarks.plots import draw_panels

    panels = {f"context {context}": lines for context, lines in by_nodes(records).items()}
    draw_panels(panels, "nodes in the batch", "tokens/s", path)


def write_shares(runs: list[Records]) -> str:
    """The linear layers' part of target passes; nothing where no pass was taken apart."""
    said = ""
    for records in runs:
        rows = list_shares(records)
        if rows:
            shape = records[0]["model"]["name"]
            said += f"{describe(shape, records)}\n\n{table(SHARES, rows)}\n"
    return said.rstrip("\n") + "\n" if said else ""


def describe(shape: str, records: Records) -> str:
    """What was run, on what."""
    model, versions = records[0]["model"], records[0]["versions"]
    return (
        f"Qwen3.5-{shape.upper()}'s shapes, {model['layers']} of "
        f"{SHAPES[shape]['num_hidden_layers']} layers ({model['linear_layers']} linear), "
        f"vocabulary {model['vocabulary']}; {versions['device']}, SGLang {versions['sglang']}, "
        f"torch {versions['torch']}, Triton {versions['triton']}."
    )


OFFLINE: dict[str, Callable[[dict[str, Records]], str]] = {
    "gains": write_means,
    "speeds": write_speeds,
}

"""Which width pays, from records of speed."""

from typing import Any

from benchmarks.engine.ablation import write_ablation
from benchmarks.engine.widths import write_nodes, write_steps


def record(tree: str | None, plugin: bool, *speeds: float) -> dict[str, Any]:
    runs = [{"batch": b, "tokens_per_s": s} for b, s in zip((1, 8), speeds, strict=True)]
    return {"tree": tree, "plugin": plugin, "runs": runs}


RECORDS = [
    record(None, False, 100, 800),
    record("4,1,5", False, 250, 1900),
    record("4,4,16", False, 240, 1700),
    record("4,4,16", True, 300, 1800),
    record("6,4,40", False, 200, 1000),
    record("6,4,40", True, 320, 1500),
]


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_each_step_takes_the_best_width_and_what_is_passed_on_counts_for_both() -> None:
    assert lines(write_steps(RECORDS))[2:] == [
        ["1", "200", "250 (5), 1.25x", "320 (40), 1.60x"],
        ["8", "1000", "1900 (5), 1.90x", "1900 (5), 1.90x"],
    ]


def test_widths_are_in_order_of_the_nodes_in_a_batch() -> None:
    rows = lines(write_nodes(RECORDS))[2:]
    assert [row[0] for row in rows] == ["1", "5", "8", "16", "40", "40", "128", "320"]
    assert ["40", "1 x 40", "200", "320"] in rows
    assert ["40", "8 x 5", "1900", "1900"] in rows


def test_the_ablation_takes_each_systems_best_width_over_the_first_trees() -> None:
    labels = ["ar", "stock-4,4,16", "stock-6,4,40", "states-6,4,40", "ours-4,4,16", "ours-6,4,40"]
    speeds = [(100, 800), (240, 1700), (200, 1000), (250, 900), (300, 1800), (320, 1500)]
    records = [
        record(label.partition("-")[2] or None, label[0] != "a", *speed) | {"label": label}
        for label, speed in zip(labels, speeds, strict=True)
    ]
    assert lines(write_ablation(records))[2:] == [
        ["1", "100", "200", "240 (16), 1.20x", "250 (40), 1.25x", "320 (40), 1.60x"],
        ["8", "800", "1000", "1700 (16), 1.70x", "900 (40), 0.90x", "1800 (16), 1.80x"],
    ]
    # one width has no step by width
    one = [r for r in records if r["tree"] in (None, "6,4,40")]
    assert lines(write_ablation(one))[2] == [
        "1", "100", "200", "250 (40), 1.25x", "320 (40), 1.60x",
    ]  # fmt: skip

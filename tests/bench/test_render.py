"""The page and the plots are made of the lines alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from benchmarks.render import fill_page, read_lines, tables

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

RUN = {"device": "a GPU", "driver": "1", "torch": "2", "triton": "3", "peers": {"sglang": "0"},
       "copy_TBps": 4.0}  # fmt: skip


def line(system: str, us: float, suite: str = "verify", tree: str = "333", **more: Any) -> str:
    case = f"{suite}/9B/{tree}/B8/fp32"
    fields = {
        "kind": "time", "case": case, "suite": suite, "model": "9B", "tree": tree, "nodes": 40,
        "depth": 3, "batch": 8, "state": "fp32", "snapshot_bytes": 2000, "system": system,
        "us": us, "min_us": us - 1, "max_us": us + 1, "layers": 1, "run": RUN,
    }  # fmt: skip
    return json.dumps(fields | more)


OURS: dict[str, Any] = {
    "round_bytes": 800,
    "scratch_bytes": 400,
    "floor_us": 5.0,
    "kernels_us": {"solve": 8.0},
}


def accuracy(numerics: str, us: float, error: float) -> str:
    case = f"accuracy/9B/333/B8/fp32/{numerics}"
    errors = {"o": error, "state": 1e-7}
    return line("ours.solve", us, "accuracy", case=case, numerics=numerics, errors=errors, **OURS)


TEXT = "\n".join([
    line("ours.core", 99.0, **OURS),
    line("ours.core", 20.0, **OURS),
    line("sglang.core", 320.0),
    line("traffic", 10.0),
    line("ours.core", 30.0, tree="any:333", **OURS),
    line("ours.solve", 6.0, tree="chain8", **OURS),
    line("replayssm0.solve", 15.0, tree="chain8"),
    line("sglang.solve", 18.0, tree="chain8"),
    line("ours.commit", 200.0, suite="commit", layers=24, **OURS),
    line("sglang.commit", 220.0, suite="commit"),
    accuracy("fp32", 20.0, 1.7e-3),
    accuracy("bf16-readout", 18.0, 2.5e-3),
    line("ours.apart", 240.0, suite="round", **OURS | {"layers": 24, "floor_us": 48.0}),
    line("ours.folded", 192.0, suite="round", **OURS | {"layers": 24, "floor_us": 48.0}),
    line("sglang.round", 2400.0, suite="round", layers=24),
    line("sglang.solve", 450.0, "mixer", mixer="kda"),
    line("ours.solve", 30.0, "mixer", mixer="kda", **OURS),
    line("ours.solve", 40.0, "mixer", "any:333", mixer="kda", **OURS),
    line("ours.core", 12.0, suite="scaling", tree="random64d8", **OURS),
    json.dumps({"kind": "compile", "case": "scaling/9B/x/B8/fp32", "ours": True, "text_s": 0.1,
                "build_s": {"ours.core": 7.0}}),
    json.dumps({"kind": "refused", "case": "verify/9B/y/B1/fp32", "error": "o 7"}),
    json.dumps({"kind": "skipped", "case": "verify/9B/333/B8/fp32", "error": "out of time"}),
])  # fmt: skip


def test_the_tables_hold_the_last_figures_and_their_ratios() -> None:
    page = tables(read_lines(TEXT))
    assert "| 9B | 333 | 40 | 8 | fp32 | 320.0 | 20.0 | 19.0 to 21.0 | 16.00x |" in page
    assert "| 5.0 | 20.0 | 4.00x | 10.0 | 0.80x | solve 8.0 |" in page
    assert "| solve | 18.0 | 15.0 |  |  | 6.0 | 2.50x |" in page
    assert "| core | 20.0 | 30.0 | 1.50x |" in page
    columns = "20.0 | 1.7e-03, 1.0e-07 |  |  | 18.0 | 2.5e-03, 1.0e-07"
    assert f"| 9B | 333 | 40 | 8 | fp32 | solve | {columns} |" in page
    assert "| kda | 9B | 333 | 40 | 8 | solve | 450.0 | 30.0 | 29.0 to 31.0 | 15.00x |" in page
    assert "| any:333 | 40 | 8 | solve | 450.0 | 40.0 | 39.0 to 41.0 | 11.25x | 5.0 |" in page
    assert "| 24 | 5.0 | 220.0 | 200.0 | 1.10x |" in page
    assert "| fp32 | 2.0 | 100.0 | 10.0 | 8.0 | 1.25x | 12.50x |" in page
    assert "| scaling/9B/x/B8/fp32 | ours.core | 0.10 | 7.0 |" in page
    assert "| verify/9B/y/B1/fp32 | refused | o 7 |" in page
    assert "99.0" not in page
    assert "out of time" not in page


def test_a_wrong_answer_withdraws_earlier_figures_and_a_later_run_restores_them() -> None:
    refused = json.dumps({"kind": "refused", "case": "verify/9B/333/B8/fp32", "error": "o 7"})
    assert read_lines(TEXT).us("verify/9B/333/B8/fp32", "ours.core") == 20.0
    withdrawn = read_lines(f"{TEXT}\n{refused}")
    assert withdrawn.us("verify/9B/333/B8/fp32", "ours.core") is None
    assert "| verify/9B/333/B8/fp32 | refused | o 7 |" in tables(withdrawn)
    restored = read_lines(f"{TEXT}\n{refused}\n{line('ours.core', 21.0, **OURS)}")
    assert restored.us("verify/9B/333/B8/fp32", "ours.core") == 21.0
    assert "verify/9B/333/B8/fp32" not in restored.missing


def test_without_lines_the_page_says_so() -> None:
    page = fill_page(f"before\n{BEGIN}\nold\n{END}\nafter\n", read_lines(""))
    assert page == f"before\n{BEGIN}\n\nNot yet measured.\n\n{END}\nafter\n"
    assert fill_page(page, read_lines("")) == page
    with pytest.raises(ValueError, match="expected the lines"):
        fill_page("no markers", read_lines(""))


def test_plots_of_the_same_lines_are_the_same_bytes(tmp_path: Path) -> None:
    once, again = (plots.draw_all(read_lines(TEXT), tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in once] == ["speed-up.svg", "floor.svg", "memory.svg"]
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]

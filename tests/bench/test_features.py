"""README's table of mixers is what the code says."""

import json
from typing import Any

import pytest

from benchmarks import features
from benchmarks.features import PAGE, RECORD, fill_page, on_a_gpu, tables
from bolegen.errors import SpecError
from bolegen.ir import MIXERS


def test_the_table_of_the_readme_is_the_one_of_the_code() -> None:
    page, record = PAGE.read_text("utf-8"), json.loads(RECORD.read_text("utf-8"))
    assert fill_page(page, record) == page, "run python -m benchmarks.features"


def test_every_mixer_has_a_row() -> None:
    rows = tables({"tests": []}).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(MIXERS)
    assert all(row.endswith("| static, run-time | replay, pku | not yet |") for row in rows)


def test_what_does_not_compile_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(template: str, spec: Any, **_: Any) -> None:
        if template.startswith("any") or spec.factors == "pku":
            raise SpecError("not supported")

    monkeypatch.setattr(features, "compile_template", refuse)
    for row in tables({"tests": []}).splitlines()[2:]:
        assert row.endswith("| static | replay | not yet |")


def record(**outcomes: str) -> dict[str, Any]:
    return {"tests": [{"name": name, "outcome": said} for name, said in outcomes.items()]}


def test_a_mixer_was_run_where_all_of_its_tests_passed() -> None:
    name = "test_mixers::test_a_round[{}-replay-any:64]"
    mixed = {name.format("mamba2"): "passed", name.format("gdn_neg"): "passed"}
    mixed |= {name.format("deltanet"): "passed", "test_other::test[deltanet]": "failure"}
    known = record(**mixed)
    found = [mixer.name for mixer in MIXERS.values() if on_a_gpu(mixer, known)]
    assert found == ["gdn_neg", "mamba2"]
    assert on_a_gpu(MIXERS["gdn"], record(**{"test_h200::test_the_9b_layer": "passed"}))

"""Decoding by batch and context: what is timed, and what is printed."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import drive, points
from benchmarks.engine.records import read_records, write_records
from benchmarks.serving import offline, offline_page, page, shares
from support.offline_engine import LAYERS, ROUND_S, Engine, draw


def speed(engine: Engine, batch: int, context: int, new: int, repeats: int = 1) -> dict[str, Any]:
    prompts = draw(batch, context)
    return points.measure_speed(engine, prompts, new, repeats, lambda: engine.now)


@pytest.mark.parametrize("context", [10, 500])
def test_prefill_is_no_part_of_a_speed(context: int) -> None:
    found = speed(Engine(a_round=4), 3, context, 41, 2)
    assert found["tokens_per_s"] == pytest.approx(3 * 40 / (10 * ROUND_S))
    assert found["rounds"] == 10
    assert found["seconds"] == pytest.approx(10 * ROUND_S)
    assert found["accepted"] == pytest.approx(4.1)
    plain = speed(Engine(), 1, context, 5)
    assert plain["tokens_per_s"] == pytest.approx(1 / ROUND_S)
    assert plain["accepted"] is None


@pytest.mark.parametrize(
    "meta", [{"finish_reason": {"type": "abort"}}, {"num_retractions": 1}, {"short": True}]
)
def test_an_answer_that_was_cut_or_begun_again_has_no_speed(meta: dict[str, Any]) -> None:
    engine = Engine()
    engine.meta = meta
    if "short" in meta:
        engine.stream = lambda prompts, _: Engine().stream(prompts, 3)  # type: ignore[assignment]
    with pytest.raises(points.PointError, match="at one go"):
        speed(engine, 2, 4, 9)


def test_points_are_what_was_said_and_the_shortest_is_repeated() -> None:
    asked = points.list_points("8:1,2 64:1")
    assert asked == [(8, 1), (8, 2), (64, 1)]
    with pytest.raises(ValueError, match="contexts"):
        points.list_points("1024")
    engine = Engine()
    runs = points.measure_points(engine, asked, draw, new_tokens=4, repeats=2)
    # the first of a context warms up
    assert engine.asked == [(8, 1), (8, 1), (8, 1), (8, 2), (8, 2), (64, 1), (64, 1)]
    assert [(run["context"], run["batch"], len(run["speeds"])) for run in runs] == [
        (8, 1, 2), (8, 2, 2), (64, 1, 1),
    ]  # fmt: skip
    assert runs[1]["probe"]["round"]["2"]["calls"] == 20


def test_an_engine_has_room_for_every_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["points.py", "1024:1,16 32768:4"])
    points.main()
    requests, length, tokens = map(int, capsys.readouterr().out.split())
    assert (requests, length) == (16, 32768 + points.ROOM)
    assert tokens == 4 * length


def run_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, a_round: int, **said: Any
) -> dict[str, Any]:
    """drive.py as its command runs it, on a module that is not SGLang."""
    import torch

    engines: list[Engine] = []

    def start(**arguments: Any) -> Engine:
        engines.append(Engine(a_round, **arguments, ours=label.startswith("ours")))
        return engines[0]

    fake: Any = types.ModuleType("sglang")
    fake.Engine, fake.__version__ = start, "0.5.23"
    monkeypatch.setitem(sys.modules, "sglang", fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    for name in ("BOLEGEN_ENABLE", "BOLEGEN_TIERS", "SGLANG_SIMULATE_ACC_LEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(points.measure_speed, "__defaults__", (lambda: engines[0].now,))
    model = tmp_path / "m_9b"
    model.mkdir(exist_ok=True)
    types_ = ["linear_attention"] * LAYERS + ["full_attention"]
    config = {"layer_types": types_, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 9}
    (model / "config.json").write_text(json.dumps(config))
    out = tmp_path / f"{label}.json"
    words = ["drive.py", "--model", str(model), "--out", str(out), "--new-tokens", "81"]
    words += ["--contexts", "1024:1,4 8192:1", "--kernels", "1024:2", "--repeats", "2"]
    if "-" in label:
        words += ["--tree", label.partition("-")[2], "--accept", str(a_round)]
    monkeypatch.setattr(sys, "argv", words + ["--plugin"] * label.startswith("ours"))
    drive.main()
    assert engines[0].down
    assert engines[0].said["cuda_graph_bs_decode"] == [1, 2, 4]
    record: dict[str, Any] = json.loads(out.read_text())
    if label.startswith("ours"):
        record["bolegen"] = {"bolegen_rounds_total": 9}
    return record | said


def test_one_run_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {"ar": 1, "chain-4,1,5": 4, "stock-4,4,16": 4, "ours-4,4,16": 5}
    records = [run_drive(tmp_path, monkeypatch, *system) for system in systems.items()]
    offline.check_offline(records)
    [mean] = offline.list_gains(records)
    assert mean[:4] == ["4", "4x4x16", "3", "1.25 (1.25-1.25)"]
    assert mean[4:] == ["5.00 (5.00-5.00)", "1.25 (1.25-1.25)", "-"]
    first = offline.list_speeds(records)[0]
    assert first[:7] == ["4x4x16", "1024", "1", "100", "400", "400", "500"]
    assert first[10] == "10.00 (9.00-20.00)"
    assert [row[1] for row in shares.list_shares(records)] == ["1", "5", "16"]
    assert "-" not in shares.list_shares(records)[2]
    # 80 tokens by 5 are 16 rounds of 10 ms, by the clock as by the probe
    assert offline.list_waits(records)[-1] == "ours-4,4,16: 1.00 to 1.00"
    assert "32768 x 16 (512k tokens to read, 2.0 GiB of KV" in offline.list_left_out(records)
    write_records(tmp_path / "0.5.23-offline-9b.jsonl", records)
    text = page.write_page(page.PAGE.read_text("utf-8"), tmp_path)
    assert "| 9B | 4 | 4x4x16 | 3 | 1.25" in text
    drawn = offline_page.by_nodes(records)[1024]["bolegen, 4x4x16"]
    assert [(nodes, round(speed)) for nodes, speed in drawn] == [(16, 500), (64, 2000)]
    assert "4 of 32 layers (3 linear)" in text


def test_what_was_not_as_asked_has_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        run_drive(tmp_path, monkeypatch, *system)
        for system in (("ar", 1), ("stock-4,4,16", 4), ("ours-4,4,16", 4))
    ]
    base, stock, ours = records
    assert not offline.find_faults(ours)
    idle = ours | {"bolegen": {"bolegen_rounds_total": 0}}
    assert "no round" in offline.find_faults(idle)[0]
    assert "accepted length" in offline.find_faults(stock | {"accept": 5.0})[0]
    assert not offline.list_speeds([base, stock, idle])
    with pytest.raises(ValueError, match="points"):
        offline.check_offline([base, stock | {"runs": stock["runs"][:1]}])
    with pytest.raises(ValueError, match="first"):
        offline.check_offline([stock, base])
    files = []
    for record in records:
        files.append(str(tmp_path / f"{record['label']}.json"))
        Path(files[-1]).write_text(json.dumps(record))
    with pytest.raises(SystemExit) as stopped:
        offline.main([*files, str(tmp_path / "none.json")])
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    assert "no result: none.json" in said
    assert "not faster than stock-4,4,16 at [(1024, 1), (1024, 4), (8192, 1)]" in said


def test_a_pass_that_was_not_told_costs_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "stop_profile", lambda _: None)
    record = run_drive(tmp_path, monkeypatch, "ar", 1)
    assert "expected one trace" in record["no_passes"]
    assert len(record["runs"]) == 3
    write_records(tmp_path / "0.5.23-shares-9b.jsonl", [record])
    assert read_records([tmp_path / "0.5.23-shares-9b.jsonl"])[0] == [record]
    assert "<!-- shares: begin -->\n\nNot yet run." in page.write_page(
        page.PAGE.read_text("utf-8"), tmp_path
    )

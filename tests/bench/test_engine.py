"""The judges of the engine's runs: each must pass what is right and see what is wrong."""

import json
import random
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.engine import page, report, shapes, speed
from benchmarks.engine.answers import find_parting
from benchmarks.engine.drive import alone
from benchmarks.engine.records import read_records, write_records

TOKENS = [[5, 6, 7, 8], [1, 2, 3, 4]]


def draw(rate: float, seed: int, count: int = 3000) -> dict[str, int]:
    numbers = random.Random(seed)
    return Counter(str(int(numbers.expovariate(rate))) for _ in range(count))


def engine(tree: str | None, plugin: bool, **said: Any) -> dict[str, Any]:
    run = {"batch": 2, "output_ids": TOKENS, "accepted": 2.0, "rounds": [2, 2]}
    label = ("ours" if plugin else "stock") if tree else "ar"
    counted = {"bolegen_rounds_total": 9} if plugin else None
    return {
        "label": label, "tree": tree, "plugin": plugin, "memory": {}, "bolegen": counted,
        "runs": [run],
    } | said  # fmt: skip


def changed(record: dict[str, Any], **said: Any) -> dict[str, Any]:
    return record | {"runs": [record["runs"][0] | said]}


def test_samples_of_one_law_pass_and_of_another_do_not() -> None:
    chances = [report.compare_counts(draw(0.2, i), draw(0.2, 1000 + i)) for i in range(40)]
    assert min(chances) > report.UNLIKELY
    assert 0.3 < sum(chances) / len(chances) < 0.7
    assert report.compare_counts(draw(0.2, 0), draw(0.3, 1)) < report.UNLIKELY
    base, ours = engine(None, False), engine("4,3,16", True)
    base["samples"], ours["samples"] = [{"1": draw(0.2, 0)}], [{"1": draw(0.3, 1)}]
    assert "another law" in report.report_samples(base, [base, ours])[0]


def test_tokens_may_leave_decoding_at_a_tie_alone() -> None:
    base = changed(engine(None, False), leads=[[2.0, 2.0, 0.0, 2.0] for _ in TOKENS])
    stock = engine("4,3,16", False)
    ours = engine("4,3,16", True)
    at_tie = changed(ours, output_ids=[[5, 6, 0, 0], TOKENS[1]])
    clear = changed(ours, output_ids=[[5, 0, 0, 0], TOKENS[1]])
    assert not report.find_faults(base, [base, stock, ours])
    assert not report.find_faults(base, [base, stock, at_tie])
    assert "leads lost" in report.find_faults(base, [base, stock, clear])[0]
    assert "unknown" in report.find_faults(engine(None, False), [base, stock, at_tie])[0]
    passed = ours | {"bolegen": {"bolegen_rounds_total": 0}}
    assert "no round" in report.find_faults(base, [base, stock, passed])[0]
    slow = changed(ours, accepted=1.5)
    assert "accepted length" in report.find_faults(base, [base, stock, slow])[0]


def test_an_answer_of_another_length_is_no_answer() -> None:
    assert find_parting([1, 2], [1, 2]) is None
    assert find_parting([1, 2], [1, 3], [9.0, 0.0]) == (1, 0.0)
    with pytest.raises(ValueError, match="shorter"):
        find_parting([1, 2], [1])


def test_conversations_must_find_in_the_cache_what_the_engine_finds() -> None:
    def talk(cached: int, tail: int = 0, lead: float = 0.0) -> list[dict[str, Any]]:
        first = {"cached": [0, cached], "output_ids": [[1], [2]], "leads": [[9.0], [9.0]]}
        second = {"cached": [0, 64], "output_ids": [[1], [tail]], "leads": [[9.0], [lead]]}
        return [first, second]

    base, stock = engine(None, False, talks=talk(64)), engine("4,3,16", False, talks=talk(64))
    ours = engine("4,3,16", True, talks=talk(64, tail=9))
    assert report.report_talks([base, stock, ours]) == []
    clear = engine(None, False, talks=talk(64, lead=2.0))
    assert "leads lost" in report.report_talks([clear, stock, ours])[0]
    unknown = [{**turn, "leads": []} for turn in talk(64)]
    assert "unknown" in report.report_talks([base | {"talks": unknown}, stock, ours])[0]
    ours["talks"] = talk(0)
    assert "cached tokens" in report.report_talks([base, stock, ours])[0]


def timed(tree: str | None, plugin: bool, ms: float, us: float) -> dict[str, Any]:
    call = {"device": [us, us, us], "host": 9.0, "calls": 50}
    probe = {what: {"2": call} for what in ("verify", "commit")}
    run = {"batch": 2, "round_ms": [ms, ms, ms], "tokens_per_s": 2000 / ms}
    return engine(tree, plugin, probe=probe, runs=[run], versions={})


@pytest.mark.parametrize(("ms", "us", "code"), [(4, 90, 0), (6, 90, 1), (4, 110, 1)])
def test_a_slower_round_or_verify_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ms: float, us: float, code: int
) -> None:
    files = []
    for record in (
        timed(None, False, 2, 0),
        timed("4,3,16", False, 5, 100),
        timed("4,3,16", True, ms, us),
    ):
        files.append(tmp_path / f"{record['label']}.json")
        files[-1].write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["speed.py", *map(str, files)])
    with pytest.raises(SystemExit) as stopped:
        speed.main()
    assert stopped.value.code == code


def test_tiers_are_the_fastest_of_each_batch() -> None:
    def record(tree: str | None, plugin: bool, speeds: list[int]) -> dict[str, Any]:
        pairs = zip((1, 4, 8, 16), speeds, strict=True)
        runs = [{"batch": batch, "tokens_per_s": said} for batch, said in pairs]
        return engine(tree, plugin, runs=runs)

    records = [
        record(None, False, [2, 8, 16, 99]),
        record("4,4,16", False, [999] * 4),  # SGLang's own are no choice
        record("4,4,16", True, [5, 15, 40, 60]),
        record("4,3,16", True, [999] * 4),  # nor is another topk
        record("8,4,64", True, [9, 20, 30, 40]),
    ]
    assert speed.choose_tiers(records) == "1:8x64 8:4x16 16:0"


def test_a_model_has_a_word_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shapes.py", str(tmp_path / "m_small"), "small"])
    shapes.main()
    held = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "m_small").iterdir()}
    assert sorted(held) == ["config", "generation_config", "tokenizer", "tokenizer_config"]
    config, words = held["config"], held["tokenizer"]["model"]["vocab"]
    assert (config["hidden_size"], config["layer_types"].count("full_attention")) == (2048, 2)
    assert sorted(words.values()) == list(range(config["vocab_size"]))
    made = Tokenizer.from_file(str(tmp_path / "m_small" / "tokenizer.json"))
    assert made.encode("w5 w32767 other").ids == [5, 32767, 0]
    assert made.decode([7, 0, 9]) == "w7 w9"


def test_records_keep_what_tells_answers_apart(tmp_path: Path) -> None:
    base, ours = engine(None, False), engine("4,3,16", True)
    other = changed(ours, output_ids=[[5, 6, 9, 9], TOKENS[1]])
    path = tmp_path / "run.jsonl"
    write_records(path, [base, ours, other])
    held, missing = read_records([path, tmp_path / "none.json"])
    assert missing == ["none.json"]
    assert held[0] == base
    assert [run["output_ids"] for r in held[1:] for run in r["runs"]] == [
        [[], []],
        [[5, 6, 9], []],
    ]
    assert report.list_tokens(held) == report.list_tokens([base, ours, other])


def test_the_page_says_what_the_files_say() -> None:
    held = page.PAGE.read_text("utf-8")
    assert page.write_page(held, page.FOLDER) == held
    assert "bolegen, 4x3x16" in held


def test_plain_decoding_is_measured_first(tmp_path: Path) -> None:
    order: list[str] = []

    def measure(name: str) -> None:
        with alone(Namespace(out=tmp_path / f"{name}.json", peers=3)):
            order.append(name)
        (tmp_path / f"{name}.json").touch()

    engines = [Thread(target=measure, args=(name,)) for name in ("ours", "stock", "ar")]
    for engine_ in engines:
        engine_.start()
    for engine_ in engines:
        engine_.join(timeout=20)
    assert order[0] == "ar"
    assert sorted(order) == ["ar", "ours", "stock"]

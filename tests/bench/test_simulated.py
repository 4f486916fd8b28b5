"""Accepted lengths that are simulated by draft steps, and records of trees by batch size."""

import os
from typing import Any

import pytest

from benchmarks.engine import simulated
from benchmarks.engine.records import count_nodes, find_length, find_tree
from benchmarks.serving import offline, offline_page

TIERS: dict[str, Any] = {
    "label": "tiers-6,4,40",
    "tree": "6,4,40",
    "tiers": "1:6x40 4:4x16 16:0",
    "accept": {"6": 5.6, "4": 4.3},
    "plugin": True,
}
MODEL = {"name": "9b", "layers": 8, "linear_layers": 6, "vocabulary": 9, "kv_bytes": 1}


def run(batch: int, speed: float, accepted: float | None) -> dict[str, Any]:
    call = {"device": [1.0, 2.0, 3.0], "calls": 9}
    seen = {"round": {str(batch): call}, "verify": {str(batch): call}}
    return {
        "context": 1024, "batch": batch, "tokens_per_s": speed, "accepted": accepted,
        "probe": seen, "seconds": 1.0, "rounds": 9,
    }  # fmt: skip


def record(label: str, speeds: list[float], accepted: float | None, **more: Any) -> dict[str, Any]:
    tree = label.partition("-")[2] or None
    runs = [run(batch, speed, accepted) for batch, speed in zip((1, 4, 16), speeds, strict=True)]
    versions = {"device": "GPU", "sglang": "0", "torch": "0", "triton": "0"}
    return {
        "label": label, "tree": tree, "plugin": False, "accept": accepted, "bolegen": None,
        "model": MODEL, "versions": versions, "runs": runs, **more,
    }  # fmt: skip


def test_a_batch_has_the_tree_the_nodes_and_the_length_of_its_tier() -> None:
    assert [find_tree(TIERS, batch) for batch in (1, 3, 4, 16)] == [
        "6,4,40", "6,4,40", "4,4,16", None,
    ]  # fmt: skip
    assert [count_nodes(TIERS, batch) for batch in (3, 4, 16)] == [40, 16, 1]
    assert [find_length(TIERS, batch) for batch in (3, 4, 16)] == [5.6, 4.3, 1.0]
    fixed = {"tree": "4,1,5", "accept": 4.0}
    assert (find_tree(fixed, 99), count_nodes(fixed, 99), find_length(fixed, 99)) == (
        "4,1,5", 5, 4.0,
    )  # fmt: skip


def test_lengths_are_one_or_by_steps() -> None:
    assert simulated.parse_lengths("5.6") == 5.6
    assert simulated.parse_lengths("6:5.6 4:4.3") == {"6": 5.6, "4": 4.3}
    for wrong in ("", "6:", "six:5.6"):
        with pytest.raises(ValueError, match=r"could not convert|invalid literal"):
            simulated.parse_lengths(wrong)


def test_a_round_is_simulated_at_the_length_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # the probe's own process starts with the engine's environment
    for name in ("SGLANG_SIMULATE_ACC_LEN", simulated.KEY):
        monkeypatch.setenv(name, "")
    os.environ |= simulated.environment({"6": 5.6, "4": 4.3})
    assert float(os.environ["SGLANG_SIMULATE_ACC_LEN"]) > 0

    def engine(**said: Any) -> Any:
        return said

    for steps, length in ((6, 5.6), (4, 4.3), (0, 1.0)):
        got = simulated.simulate(engine, spec_steps=steps, simulate_acc_len=-1.0, bs=3)
        assert got == {"spec_steps": steps, "simulate_acc_len": length, "bs": 3}
    with pytest.raises(ValueError, match="expected a length for 5 steps"):
        simulated.simulate(engine, spec_steps=5)
    assert simulated.environment(5.6) == {simulated.KEY: "", "SGLANG_SIMULATE_ACC_LEN": "5.6"}
    assert simulated.environment(None) == {simulated.KEY: ""}


def test_trees_by_batch_size_are_beside_sglangs_first_and_chains_beside_its_own() -> None:
    rounds = {"bolegen_rounds_total": 1}
    mine: dict[str, Any] = {"plugin": True, "bolegen": rounds}
    base = record("ar", [100, 400, 1600], None)
    chain = record("chain-4,1,5", [200, 800, 2400], 4.0)
    stock = record("stock-6,4,40", [300, 600, 900], 5.6)
    ours = record("ours-4,1,5", [220, 880, 3000], 4.0, **mine)
    tiers = record("tiers-6,4,40", [330, 900, 1584], None, **mine) | TIERS
    tiers["runs"] = [run(1, 330, 5.6), run(4, 900, 4.3), run(16, 1584, 1.0)]
    records = [base, chain, stock, ours, tiers]
    offline.check_offline(records)
    assert not [fault for r in records for fault in offline.find_faults(r)]
    rows = offline.list_speeds(records)
    assert [row[0] for row in rows[:3]] == ["4x1x5"] * 3
    assert [row[0] for row in rows[3:]] == [
        "6x4x40, by batch",
        "4x4x16, by batch",
        "none, by batch",
    ]
    assert [row[7] for row in rows] == ["1.10", "1.10", "1.25", "1.10", "1.50", "1.76"]
    assert offline.list_plain(records) == [["1024", "16", "1600", "1584", "0.990"]]
    assert offline.list_gains(records)[1][1] == "by batch: 1:6x40 4:4x16 16:0"
    said = offline_page.write_chains({"9b": records})
    assert "8 of 32 layers" in said
    assert "| 4x4x16, by batch | 1024 | 4 |" in said
    drawn = offline_page.by_nodes(records)[1024]["bolegen, trees by batch size, 6x4x40"]
    assert drawn == [(40, 330), (64, 900), (16, 1584)]
    # a tier at another's length, and a record of no tiers
    tiers["runs"][1]["accepted"] = 5.6
    assert "to be simulated 4.3" in offline.find_faults(tiers)[0]
    assert len(offline.list_speeds([base, chain, ours])) == 3
    assert find_length(tiers | {"accept": {"6": 5.6}}, 4) is None
    # SGLang's first trees at another length: the chain does not take their place
    stock["runs"][1]["accepted"] = 1.0
    tiers["runs"][1]["accepted"] = 4.3
    assert [pair[0]["label"] for pair in offline.list_pairs(records)] == ["chain-4,1,5"]

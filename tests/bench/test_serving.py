"""Engines under load: what is asked and measured, and what is printed only once it was checked.

The engine here answers by arithmetic and lives on a clock that jumps from one event to the next.
"""

import asyncio
import itertools
import json
import selectors
import statistics
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.margins import measure_leads
from benchmarks.serving import check, page, report, serve
from benchmarks.serving.load import Request, RequestError, offer
from benchmarks.serving.talks import Shape, draw_talks, read_text

TEXT = tuple(range(100, 600))
SHAPE = Shape(talks=6, groups=2, turns=3, system_tokens=32, question_tokens=8, answer_tokens=12)
PREFILL_S, ROUND_S = 1e-3, 1e-2
loops: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(autouse=True)
def _close_loops() -> Iterator[None]:
    yield
    while loops:
        loop = loops.pop()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class Jump(selectors.SelectSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for another"
        self.now += max(0.0, timeout)
        return super().select(0)


def virtual_loop() -> tuple[asyncio.AbstractEventLoop, Callable[[], float]]:
    jump = Jump()
    loop = asyncio.SelectorEventLoop(jump)
    loop.time = lambda: jump.now  # type: ignore[method-assign]
    loops.append(loop)
    return loop, loop.time


class Engine:
    """Greedy in arithmetic; a prefix cache of whole prompts; several tokens a round."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, a_round: int = 1, **said: Any) -> None:
        self.loop, self.a_round, self.said = loop, a_round, said
        self.cache: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.other: dict[int, int] = {}  # position in an answer: token in place of the right one
        self.fails_at = -1
        self.down = False

    def answer(self, prompt: list[int], count: int) -> list[int]:
        found: list[int] = []
        for at in range(count):
            held = prompt + found
            found.append(self.other.get(at, sum(held[-5:]) * 31 % 997))
        return found

    def found(self, prompt: list[int]) -> int:
        def common(held: list[int]) -> int:
            pairs = enumerate(zip(held, prompt, strict=False))
            return next((i for i, (a, b) in pairs if a != b), min(len(held), len(prompt)))

        return min(max(map(common, self.cache), default=0), len(prompt) - 1)

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> AsyncIterator[dict[str, Any]]:
        assert stream
        assert sampling_params["temperature"] == 0
        self.prompts.append(list(input_ids))
        return self.stream(list(input_ids), sampling_params["max_new_tokens"])

    async def stream(self, prompt: list[int], count: int) -> AsyncIterator[dict[str, Any]]:
        cached = self.found(prompt)
        meta = {"prompt_tokens": len(prompt), "cached_tokens": cached, "num_retractions": 0}
        await asyncio.sleep(PREFILL_S * (len(prompt) - cached))
        tokens = self.answer(prompt, count)
        ids = tokens[:1]
        while len(ids) < count:
            # the engine's list grows under the reader's hand
            yield {"output_ids": ids, "meta_info": meta | {"finish_reason": None}}
            await asyncio.sleep(ROUND_S)
            if 0 < self.fails_at <= len(self.prompts):
                yield {"output_ids": ids, "meta_info": meta | {"finish_reason": {"type": "abort"}}}
                return
            ids += tokens[len(ids) : len(ids) + self.a_round]
        self.cache.append(prompt + tokens)
        yield {"output_ids": ids, "meta_info": meta | {"finish_reason": {"type": "length"}}}

    def generate(
        self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], **said: Any
    ) -> list[dict[str, Any]]:
        assert said == {"return_logprob": True, "top_logprobs_num": 2}
        outs = []
        for prompt, asked in zip(input_ids, sampling_params, strict=True):
            ids = self.answer(prompt, asked["max_new_tokens"])
            tops = [[(-0.5, token, None), (-1.5, 7, None)] for token in ids]
            outs.append({"output_ids": ids, "meta_info": {"output_top_logprobs": tops}})
        return outs

    def flush_cache(self) -> Any:
        self.cache.clear()
        return types.SimpleNamespace(success=True)

    def get_server_info(self) -> dict[str, Any]:
        memory = {"token_capacity": 4096, "kvcache": 0.5}
        state = {"memory_usage": memory, "effective_max_running_requests_per_dp": 4}
        return {"internal_states": [state]}

    def shutdown(self) -> None:
        self.down = True


def held(engine: Engine, clock: Callable[[], float], rate: float = 5.0) -> list[Request]:
    talks = draw_talks(SHAPE, rate, 1, TEXT)
    return engine.loop.run_until_complete(offer(engine, talks, clock))


def record(label: str, tmp_path: Path, **said: Any) -> dict[str, Any]:
    """What serve.py writes, without its process."""
    loop, clock = virtual_loop()
    engine = Engine(loop, a_round=4 if "-" in label else 1)
    engine.other = said.pop("other", {})
    words = ["--model", str(tmp_path), "--out", f"{label}.json", "--rate", "5", "--loads", "0.5,1"]
    words += ["--talks", "4", "--turns", "3", "--answer-tokens", "12", "--seeds", "1,2"]
    if label == "ar":
        words.append("--margins")
    options = serve.read_options(words)
    runs = serve.measure(engine, options, clock)
    if options.margins:
        serve.add_leads(engine, runs)
    found: dict[str, Any] = {
        "label": label, "plugin": label.startswith("ours"), "tiers": None, "replayssm": False,
        "tree": label.partition("-")[2] or None, "accept": None, "versions": {"sglang": "0.5.23",
        "device": "none", "torch": "-", "triton": "-"}, "settings": serve.describe(options),
        "runs": runs, "running": 4, "memory": {"token_capacity": 4096, "kvcache": 0.5},
        "memory_lines": ["KV Cache is allocated."],
    }  # fmt: skip
    return json.loads(json.dumps(found | said))  # type: ignore[no-any-return]


def test_a_seed_says_everything_and_a_rate_the_times_alone() -> None:
    slow, again, fast = (draw_talks(SHAPE, rate, 3, TEXT) for rate in (1.0, 1.0, 4.0))
    assert slow == again
    assert slow != draw_talks(SHAPE, 1.0, 4, TEXT)
    assert [(t.system, t.turns) for t in slow] == [(t.system, t.turns) for t in fast]
    assert [t.arrival_s for t in slow] == pytest.approx([4 * t.arrival_s for t in fast])


def test_arrivals_are_a_poisson_process_and_means_are_those_asked_for() -> None:
    talks = draw_talks(Shape(talks=4000, system_tokens=8), 5.0, 1, TEXT)
    times = [0.0, *(t.arrival_s for t in talks)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # as the mean: exponential
    # arrivals in a second have the variance of their mean
    counts = [0] * int(times[-1])
    for arrival in times[1:]:
        if arrival < len(counts):
            counts[int(arrival)] += 1
    assert statistics.variance(counts) == pytest.approx(statistics.fmean(counts), rel=0.2)
    turns = [turn for talk in talks for turn in talk.turns]
    assert statistics.fmean(len(talk.turns) for talk in talks) == pytest.approx(4, rel=0.05)
    assert statistics.fmean(t.answer_tokens for t in turns) == pytest.approx(160, rel=0.05)
    thought = [t.think_s for talk in talks for t in talk.turns[1:]]
    assert statistics.fmean(thought) == pytest.approx(1.0, rel=0.05)
    assert len({talk.system for talk in talks}) == 4


def test_prompts_grow_by_answer_and_question_and_are_equal_in_all_systems() -> None:
    asked = []
    for a_round in (1, 4):
        loop, clock = virtual_loop()
        engine = Engine(loop, a_round=a_round)
        requests = held(engine, clock)
        asked.append(sorted(engine.prompts))
        talks = draw_talks(SHAPE, 5.0, 1, TEXT)
        for before, after in itertools.pairwise(requests):
            if before.talk == after.talk:
                history = talks[after.talk].turns[after.turn]
                grown = before.prompt_tokens + len(before.output_ids) + len(history.question)
                assert after.prompt_tokens == grown
                assert after.cached_tokens >= before.prompt_tokens + len(before.output_ids) - 1
    assert asked[0] == asked[1]


def test_times_are_those_of_the_clock() -> None:
    loop, clock = virtual_loop()
    requests = held(Engine(loop, a_round=4), clock)
    talks = draw_talks(SHAPE, 5.0, 1, TEXT)
    for at, request in enumerate(requests):
        turn = talks[request.talk].turns[request.turn]
        before = requests[at - 1].end if request.turn else talks[request.talk].arrival_s
        assert request.due == pytest.approx(before + turn.think_s)
        assert request.sent == pytest.approx(request.due)
        prefill = PREFILL_S * (request.prompt_tokens - request.cached_tokens)
        assert request.first - request.due == pytest.approx(prefill)
        rounds = -(-(turn.answer_tokens - 1) // 4)
        assert request.end - request.first == pytest.approx(rounds * ROUND_S)


def test_figures_are_computed_by_their_definitions() -> None:
    columns = serve.COLUMNS
    rows = [[0, 0, 1.0, 1.001, 1.1, 2.1, 100, 0, 0, 5], [0, 1, 3.0, 3.0, 3.3, 3.3, 200, 150, 2, 1]]
    found = report.figures({"columns": columns, "rows": rows, "tokens": [11, 1]})
    assert found["ttft_mean"] == pytest.approx(200)
    assert found["tpot_mean"] == pytest.approx(100)  # an answer of one token has none
    assert found["hit_rate"] == pytest.approx(50)
    assert found["retracted"] == 1
    assert found["tokens_per_s"] == pytest.approx(12 / 2.3)
    values = [float(v) for v in range(101)]
    assert [report.percentile(values, p) for p in (50, 99)] == [50, 99]
    assert report.percentile([3.0], 99) == 3


@pytest.mark.parametrize("fault", ["abort", "raise"])
def test_a_request_that_fails_ends_the_load(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, clock = virtual_loop()
    engine = Engine(loop)
    engine.fails_at = 4
    if fault == "raise":

        async def refuse(**_: Any) -> Any:
            raise ValueError("too long")

        monkeypatch.setattr(engine, "async_generate", refuse)
    with pytest.raises(RequestError, match=r"conversation \d+, turn \d+: .*(abort|too long)"):
        held(engine, clock)
    assert not asyncio.all_tasks(loop)


def run_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> Engine:
    """serve.py as its command runs it, in real time, on a module that is not SGLang."""
    import torch

    engines: list[Engine] = []

    def start(**said: Any) -> Engine:
        loops.append(asyncio.new_event_loop())
        engines.append(Engine(loops[-1], **said))
        engines[0].fails_at = fails_at
        return engines[0]

    fake: Any = types.ModuleType("sglang")
    fake.Engine, fake.__version__ = start, "0.5.23"
    monkeypatch.setitem(sys.modules, "sglang", fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setenv("BOLEGEN_ENABLE", "0")
    (tmp_path / "run.log").write_text("x] KV Cache is allocated. #tokens: 9\nother\n")
    words = ["--model", str(tmp_path), "--out", str(tmp_path / "ours-4,3,16.json"), "--plugin"]
    words += ["--tree", "4,3,16", "--rate", "200", "--loads", "1", "--talks", "3", "--turns", "2"]
    words += ["--answer-tokens", "4", "--system-tokens", "8", "--think-s", "0.01"]
    words += ["--log", str(tmp_path / "run.log"), "--extra", '{"max_total_tokens": 4096}']
    serve.main(words)
    return engines[0]


def test_the_command_writes_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = run_main(tmp_path, monkeypatch, -1)
    found = json.loads((tmp_path / "ours-4,3,16.json").read_text())
    assert found["settings"]["extra"] == {"max_total_tokens": 4096}
    assert engine.said["max_total_tokens"] == 4096
    assert engine.said["speculative_eagle_topk"] == 3
    assert not engine.said["disable_radix_cache"]
    assert found["memory_lines"] == ["KV Cache is allocated. #tokens: 9"]
    assert found["memory"]["token_capacity"] == 4096
    assert report.figures(found["runs"][0])["ttft_p50"] > 0
    assert engine.down


def test_a_request_that_fails_stops_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="conversation") as stopped:
        run_main(tmp_path, monkeypatch, 9)
    assert stopped.value.code != 0
    assert not (tmp_path / "ours-4,3,16.json").exists()


def test_leads_follow_the_answer_where_another_batch_left_it() -> None:
    engine = Engine(virtual_loop()[0])
    prompt = list(range(10))
    right = engine.answer(prompt, 6)
    tie = [*right[:2], 7]  # the second best, by the engine's own word
    tie += engine.answer(prompt + tie, 3)
    odd = [*right[:2], 8]
    odd += engine.answer(prompt + odd, 3)
    leads = measure_leads(engine, [prompt] * 3, [right, tie, odd])
    assert leads[:2] == [[1.0] * 6] * 2
    assert leads[2] == [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]


def at_ties(base: dict[str, Any], lead: float) -> dict[str, Any]:
    runs = [run | {"leads": [[lead] * len(ids) for ids in run["leads"]]} for run in base["runs"]]
    return base | {"runs": runs}


def test_a_speed_is_printed_only_where_answers_hold(tmp_path: Path) -> None:
    base = record("ar", tmp_path)
    same = record("stock-4,3,16", tmp_path)
    other = record("ours-4,3,16", tmp_path, other={3: 7})
    assert not any(map(check.find_faults, check.check_records([base, same], [])))
    [_, clear] = check.check_records([base, other], [])
    assert "leads lost" in check.find_faults(clear)[0]
    rows = report.list_loads([clear])
    assert {cell for row in rows for cell in row[3:]} == {"-"}
    assert "do not hold" in rows[0][2]
    [plain, tied] = check.check_records([at_ties(base, 0.0), other], [])
    assert not check.find_faults(tied)
    answers = tied["runs"][0]["answers"]
    # after its first other answer a conversation's prompts are others
    assert answers["compared"] == 4
    assert answers["alike"] == 0
    assert answers["asked"] > 4
    assert "-" not in report.list_loads([plain, tied])[1]
    unknown = at_ties(base, 0.0)
    for run in unknown["runs"]:
        del run["leads"]
    assert check.find_faults(check.check_records([unknown, other], [])[1])


def test_simulated_systems_need_one_that_was_checked(tmp_path: Path) -> None:
    base, good = record("ar", tmp_path), record("stock-4,3,16", tmp_path)
    bad = record("ours-4,3,16", tmp_path, other={3: 7})
    vouchers = check.check_records([base, good, bad], [])
    simulated = [base, good | {"accept": 4.0}, bad | {"accept": 4.0}]
    found = check.check_records(simulated, vouchers)
    assert [bool(check.find_faults(r)) for r in found] == [False, False, True]
    assert all(check.find_faults(r) for r in check.check_records(simulated, [])[1:])


def test_systems_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    base, other = record("ar", tmp_path), record("stock-4,3,16", tmp_path)
    other["settings"]["rate"] = 6.0
    with pytest.raises(ValueError, match="settings"):
        check.check_records([base, other], [])
    with pytest.raises(ValueError, match="first"):
        check.check_records([other, base], [])


@pytest.mark.parametrize(("other", "code"), [({}, 0), ({3: 7}, 1)])
def test_one_command_checks_keeps_and_fills_the_page(
    tmp_path: Path, other: dict[int, int], code: int
) -> None:
    files = []
    for label, said in (("ar", {}), ("stock-4,3,16", {}), ("ours-4,3,16", {"other": other})):
        files.append(str(tmp_path / f"{label}.json"))
        Path(files[-1]).write_text(json.dumps(record(label, tmp_path, **said)))
    with pytest.raises(SystemExit) as stopped:
        report.main([*files, "--keep", str(tmp_path), "online"])
    assert stopped.value.code == code
    kept = (tmp_path / "0.5.23-online.jsonl").read_text()
    assert "output_ids" not in kept
    empty = page.PAGE.read_text("utf-8")
    text = page.write_page(empty, tmp_path)
    assert ("bolegen, 4x3x16 | 1 | 25 of 25, 25 asked" in text) == (code == 0)
    assert text.count(page.NOT_RUN) == 3 + 4  # 9B's tables, and those without a load
    gains = page.compare_loads([json.loads(line) for line in kept.splitlines()])
    assert len(gains) == (4 if code == 0 else 0)
    if gains:
        beside = {row[2]: row for row in gains if row[0] == "1"}
        assert float(beside["plain decoding"][5]) > 2  # four tokens a round
        assert beside["SGLang's trees, 4x3x16"][5] == "1.00"


@pytest.mark.parametrize(
    ("label", "said", "kept"),
    [
        ("ar", [], ["0.50", "-"]),
        ("stock-4,3,16", ["intermediate_ssm_state_cache size: 1.25GB "
                          "intermediate_conv_window_cache size: 0.50GB "], ["0.50", "1.75"]),
        ("ours-4,3,16", ["bolegen verifies trees of 16 nodes, depth 4, in 2 layers: 0.250 GB for "
                         "9 requests in place of 9.000 GB of snapshots and windows"] * 2,
         ["0.50", "0.50"]),
        ("replayssm-4,1,5", ["intermediate_ssm_state_cache size: 0.00GB ",
                             "ring buffers allocated (record_len=16, fold=False): d=0.250GB, "
                             "k=0.125GB, g=0.000GB rawv=0.250GB, rawk=0.125GB,"],
         ["0.50", "0.75"]),
    ],
)  # fmt: skip
def test_memory_is_what_the_engine_s_log_says(
    tmp_path: Path, label: str, said: list[str], kept: list[str]
) -> None:
    states = "max_mamba_cache_size: 80, conv_state size: 0.25GB, ssm_state size: 0.25GB"
    [row] = report.list_memory([record(label, tmp_path) | {"memory_lines": [states, *said]}])
    assert row[-3:] == ["80", *kept]


def test_the_page_says_what_the_files_say() -> None:
    kept = page.PAGE.read_text("utf-8")
    assert page.write_page(kept, page.FOLDER) == kept


def test_text_is_the_model_s_own_where_it_has_some(tmp_path: Path) -> None:
    assert len(set(read_text(tmp_path))) > 1000
    (tmp_path / "prompts.json").write_text("[[1, 2], [3]]")
    assert read_text(tmp_path) == (1, 2, 3)

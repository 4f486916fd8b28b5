"""An engine that decodes on a clock of its own, and the trace of what it ran."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["LAYERS", "ROUND_S", "SERIAL", "Engine", "draw", "trace"]

PREFILL_S, ROUND_S = 1e-3, 1e-2
LAYERS = 3  # linear ones
SERIAL = "fused_sigmoid_gating_delta_rule_update_kernel"


class Engine:
    """Reads a batch's prompts one by one, then decodes ``a_round`` tokens of each at once."""

    def __init__(self, a_round: int = 1, **said: Any) -> None:
        self.a_round, self.said, self.now = a_round, said, 0.0
        self.meta: dict[str, Any] = {}
        self.asked: list[tuple[int, int]] = []
        self.folder: Path | None = None
        self.down = False

    def generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any], stream: bool = False
    ) -> Any:
        count = sampling_params["max_new_tokens"]
        self.asked.append((len(input_ids[0]), len(input_ids)))
        chunks = self.stream(input_ids, count)
        return chunks if stream else list(chunks)

    def stream(self, prompts: list[list[int]], count: int) -> Iterator[dict[str, Any]]:
        rounds = -(-(count - 1) // self.a_round)
        meta = {"num_retractions": 0, "finish_reason": None} | self.meta
        if self.a_round > 1:
            meta |= {"spec_verify_ct": rounds, "spec_accept_length": count / rounds}
        for at, prompt in enumerate(prompts):
            self.now += PREFILL_S * len(prompt)
            yield {"index": at, "output_ids": [1], "meta_info": meta}
        self.now += rounds * ROUND_S
        meta = meta | {"finish_reason": {"type": "length"}} | self.meta
        for at in range(len(prompts)):
            yield {"index": at, "output_ids": [1] * count, "meta_info": meta}

    def start_profile(self, output_dir: str, **said: Any) -> None:
        assert said["activities"] == ["GPU"]
        self.folder = Path(output_dir)

    def stop_profile(self) -> None:
        assert self.folder is not None
        events = trace("solve_gdn_any16_d4" if self.said.get("ours") else SERIAL, 16.0)
        text = json.dumps({"traceEvents": events})
        (self.folder / "1-TP-0.trace.json.gz").write_bytes(gzip.compress(text.encode()))

    def get_server_info(self) -> dict[str, Any]:
        batch = str(self.asked[-1][1])
        call = {"device": [9e3, 1e4, 2e4], "calls": 20}
        return {"internal_states": [{"probe": {"round": {batch: call}, "verify": {batch: call}}}]}

    def shutdown(self) -> None:
        self.down = True


def trace(recurrence: str, core_us: float, passes: int = 3) -> list[dict[str, Any]]:
    """Graph replays of LAYERS layers, a GEMM beside each; prefill's kernels are launched alone."""
    events: list[dict[str, Any]] = [{"ph": "X", "cat": "cuda_runtime", "name": "launch"}]

    def add(name: str, at: float, us: float, launch: int, kind: str = "kernel") -> None:
        args = {"correlation": launch}
        events.append({"cat": kind, "name": name, "ts": at, "dur": us, "args": args})

    for layer in range(LAYERS):
        add("_causal_conv1d_update_kernel", 10.0 * layer, 5, 1000 + layer)
    for i in range(passes):
        begin = 1000.0 * (i + 1)
        for layer in range(LAYERS):
            at = begin + 200 * layer
            add("_causal_conv1d_update_kernel", at, 4, i)
            add("elementwise", at + 4, 2, i)
            add(recurrence, at + 6, core_us + i, i)
            for j, name in enumerate(("norm", "gemm", "gemm", "norm", "gemm")):
                add(name, at + 50 + 10 * j, 8, i)
            add("side stream", at + 50, 8, i)  # beside the norm: no time of its own
        add("Memcpy DtoD", begin + 700, 1, i, "gpu_memcpy")
    return events[::-1]  # traces are not in order


def draw(batch: int, context: int) -> list[list[int]]:
    return [[7] * context for _ in range(batch)]

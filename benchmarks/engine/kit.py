"""SGLang's own attention test kit, its GDN verify cases, without or with the plugin.

    python -m benchmarks.engine.kit --kit FOLDER --out FILE [--plugin]

FOLDER holds SGLang's ``test`` folder where SGLang has none. First the cases as SGLang has them:
its runner publishes topk 1, so the plugin passes them on. Then trees that its backend is told of,
with random taps and SiLU, to a tolerance that neither zeros nor the tree as a chain would meet.
Exits with 1 unless all is as expected, and the plugin's verify ran where it should and only there.
"""

import argparse
import json
import os
import sys
import time
import traceback
import unittest
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine.kit_cases import CASES, Case
from benchmarks.engine.kit_parts import Run, change_kit
from bolegen_runtime.sglang import PluginError, install, register, verifier

__all__ = ["main", "run_case"]

KIT = "sglang.test.kits.attention_unittest"
GDN = f"{KIT}.attention_methods.gdn_attention"
RUNNER = f"{KIT}.runner_modes.speculative_target_verify_runner"
ATOL = 1e-3  # the largest outputs are near 0.1; SGLang's own tolerance of trees is 0.05


def set_bounds(case: Case) -> None:
    """The guard on the flags of a server for this case; the kit's own say topk 1."""
    context = import_module("sglang.srt.runtime_context").get_context()
    with context.override_server_args(
        device="cuda",
        speculative_algorithm="EAGLE",
        speculative_eagle_topk=1 if case.plan == "kit" else case.topk,
        speculative_num_steps=case.depth,
        speculative_num_draft_tokens=len(case.parents),
    ):
        install.check_scheduler(None, None)


def run_case(case: Case, *, plugin: bool, device: str) -> dict[str, Any]:
    """Run it, and say what became of it."""
    gdn, runner = import_module(GDN), import_module(RUNNER)
    if plugin:
        set_bounds(case)
    mode = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    made = gdn.GDNAttentionCase(
        name=case.name.replace(" ", "_"), backend="triton", forward_mode=mode.TARGET_VERIFY,
        num_k_heads=case.heads[0], num_v_heads=case.heads[1], page_size=16,
        prefix_lens=case.prefix, extend_lens=(len(case.parents),) * len(case.prefix),
    )  # fmt: skip
    options: dict[str, Any] = {"head_k_dim": case.dims[0], "head_v_dim": case.dims[1]}
    kind = "run_gdn_eagle_verify_case"
    if case.graph:
        kind = "run_gdn_eagle_verify_cuda_graph_case"
        options["cuda_graph_capture_batch_size"] = len(case.prefix) + case.spare
    tolerance = ATOL if case.plan == "tree" else (gdn.GDN_ATOL, gdn.GDN_TREE_ATOL)[case.topk > 1]
    run, result, began = Run(case, case.parents, tolerance), "passed", time.perf_counter()
    counted = patch.object(
        verifier.TreeVerifier, "verify", autospec=True, side_effect=verifier.TreeVerifier.verify
    )
    with counted as calls, change_kit(run, gdn, runner):
        try:
            getattr(runner, kind)(
                unittest.TestCase(), made, topk=case.topk, spec_kind=case.kind, device=device,
                **options,
            )  # fmt: skip
        except Exception as error:  # the other cases are run as well
            if not isinstance(error, AssertionError | PluginError):
                traceback.print_exc()
            result = f"{type(error).__name__}: {str(error).strip()}"
    gap = None if run.got is None else (run.real(run.got) - run.wanted).abs().max().item()
    return {
        "case": case.name, "graph": case.graph, "plan": case.plan, "result": result,
        "verifies": calls.call_count, "error": gap, "would_pass": run.mistakes,
        "largest": run.wanted.abs().max().item(), "s": time.perf_counter() - began,
    }  # fmt: skip


def find_problem(case: Case, said: dict[str, Any], *, plugin: bool) -> str | None:
    """What is not as it should be."""
    if plugin and case.plan == "bare":
        return None if "expected SiLU" in said["result"] else "expected a refusal"
    if said["result"] != "passed":
        return "failed"
    if (said["verifies"] > 0) != (plugin and case.plan == "tree"):
        return f"verify of the plugin ran {said['verifies']} times"
    chain = case.parents == tuple(range(-1, len(case.parents) - 1))
    mistakes = {"zeros"} if chain else {"zeros", "chain"}
    passing = [name for name in mistakes if said["would_pass"][name]]
    return f"{passing} would pass" if case.plan == "tree" and passing else None


def main() -> None:
    """Run all; print a line for each; exit 1 where one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kit", type=Path, help="folder with SGLang's test folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plugin", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    os.environ["BOLEGEN_ENABLE"] = "1" if options.plugin else "0"
    import sglang
    import triton

    if options.kit is not None:
        sglang.__path__.append(str(options.kit))
    if options.plugin:
        register()
        import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    said = [run_case(case, plugin=options.plugin, device=options.device) for case in CASES]
    problems = [
        find_problem(case, line, plugin=options.plugin)
        for case, line in zip(CASES, said, strict=True)
    ]
    for line, problem in zip(said, problems, strict=True):
        print(json.dumps({"ok": problem is None, "problem": problem, **line}), flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    versions = {
        "device": device, "sglang": sglang.__version__, "torch": torch.__version__,
        "triton": triton.__version__,
    }  # fmt: skip
    head = {"plugin": options.plugin, "versions": versions}
    options.out.write_text(json.dumps({**head, "cases": said}) + "\n", "utf-8")
    failed = sum(problem is not None for problem in problems)
    print(json.dumps({**head, "cases": len(said), "failed": failed}))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

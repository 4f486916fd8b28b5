"""Trees by batch size in the SGLang that is installed, without a GPU; skipped where there is none.

In a process of its own, since hooks are installed once a process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not there"
)
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "vocab_size": 4096,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
}  # fmt: skip
SCRIPT = """
import importlib, json, sys
from bolegen_runtime.sglang import hooks, install, register
register()
importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
targets = install.list_targets(hooks.active.release, hooks.active.tiers)
from sglang.srt.server_args import ServerArgs
from sglang.srt.arg_groups import overrides
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams
args = ServerArgs(
    model_path=sys.argv[1], speculative_algorithm="NEXTN", speculative_adaptive=True,
    speculative_draft_model_path=sys.argv[1], speculative_eagle_topk=4, speculative_num_steps=8,
    attention_backend="triton", sampling_backend="pytorch", grammar_backend="none",
    disable_radix_cache=True, max_running_requests=16, skip_server_warmup=True, device="cuda",
)
args.resolve_once()
view = overrides.resolved_view(args)
steps = AdaptiveSpeculativeParams(initial_steps=8, cfg_path=None)
steps.set_cuda_graph_bs([1, 4, 8, 16, 32])
print(json.dumps({
    "applied": all(install.check_applied(path, hook) for path, hook, _, _ in targets),
    "adaptive": view.speculative_adaptive,
    "nodes": [view.speculative_num_draft_tokens, overrides.max_speculative_num_draft_tokens(args)],
    "steps": {b: steps.get_steps_for_batch(b) for b in (1, 3, 4, 7, 8, 31, 40)},
    "graphs": {s: steps.cuda_graph_bs_for_step(s) for s in steps.candidate_steps},
}))
"""


def test_its_flags_and_its_policy_follow_the_tiers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    said = {"BOLEGEN_ENABLE": "1", "BOLEGEN_TIERS": "1:8x64 4:6x40 8:4x16 32:0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=os.environ | said | {"BOLEGEN_CACHE_DIR": "off", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["applied"]
    assert found["adaptive"]
    assert found["nodes"] == [64, 64]
    # a batch runs in the next larger graph, and has that graph's tree
    assert found["steps"] == {"1": 8, "3": 6, "4": 6, "7": 4, "8": 4, "31": 0, "40": 0}
    assert found["graphs"] == {"0": [32], "4": [8, 16], "6": [4], "8": [1]}

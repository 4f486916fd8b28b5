"""Modules with odd shapes, called and replayed from a graph, for ``compute-sanitizer`` to watch.

Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an allocation of its own
and a step outside is seen.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

import torch  # noqa: E402

from bolegen.codegen import EmittedModule, compile_template  # noqa: E402
from bolegen.ir import LayerSpec  # noqa: E402
from bolegen_runtime import GraphPool, LayerWeights  # noqa: E402
from support.rounds import check_commit, check_verify, import_module, make_round  # noqa: E402

__all__ = ["main"]

RAGGED = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 6, 8, 0, 11]


def main() -> None:
    """Verify and commit one round of each module, padded rows and dead nodes included."""
    spec = LayerSpec(key_heads=3, value_heads=6, d_k=80, d_v=112)
    static = "parents:" + str(RAGGED).replace(" ", "")
    for template, depth, trees in ((static, None, None), ("any:40", 9, [RAGGED] * 3)):
        emitted = compile_template(template, spec, depth=depth)
        m = import_module(emitted)
        r = make_round(m, batch=3, trees=trees, nodes=len(RAGGED), device="cuda")
        r.slots[1] = -1
        r.live = torch.ones(3, len(RAGGED), dtype=torch.bool, device="cuda")
        r.live[2, 5:] = False
        factors = m.allocate(3, 1, "cuda")
        out = r.verify(m, factors)
        check_verify(m, r, out, factors).assert_within()
        before = r.state.clone(), r.conv_state.clone()
        last = [10, 3, 4]
        nodes = torch.tensor(last, device="cuda")
        m.commit(factors, r.state, r.conv_state, r.slots, nodes)
        check_commit(m, r, factors, before, (r.state, r.conv_state), last).assert_within()
        print(f"{emitted.name}: verified and committed", flush=True)
    small = LayerSpec(key_heads=1, value_heads=2, d_k=80, d_v=112)
    replay_garbage(compile_template("any:40", small, depth=9), layers=2)
    replay_garbage(compile_template("any:64", depth=8), layers=24)


def replay_garbage(emitted: EmittedModule, layers: int) -> None:
    """A captured round of all layers on links of every kind of garbage, and its commit."""
    m = import_module(emitted)
    r = make_round(m, batch=3, layers=layers, trees=[RAGGED] * 3, device="cuda")
    weights = [LayerWeights(*of) for of in zip(r.conv_weight, r.A_log, r.dt_bias, strict=True)]
    pool = GraphPool(m, weights, r.state, r.conv_state, batches=(4,))
    pool.capture()
    n = len(RAGGED)
    wild = [0, -1, n, n - 1, 1, 1 << 31, (1 << 32) + 1, -(1 << 62), 2, 3, 3, -7, 12]
    links = torch.tensor([wild, [0] * n, [*range(1, n), -1]], device="cuda")
    counts = torch.tensor([n, 1 << 40, 7], device="cuda")
    slots = torch.tensor([2, -1, 0], device="cuda")
    for parents in (links, None):
        pair = None if parents is not None else (links, links.flip(1))
        out = pool.verify(r.x, r.a, r.b, slots, counts=counts, parents=parents, links=pair)
        assert torch.isfinite(out).all()
        pool.commit(torch.tensor([1 << 40, 0, 12], device="cuda"))
    print(f"{m.MODULE.name}: {layers} layers replayed on garbage", flush=True)


if __name__ == "__main__":
    main()

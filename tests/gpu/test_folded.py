"""On a device: verify that commits the round before, and graphs that do so in turn."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bolegen.codegen import compile_template
from bolegen.ir import DType, LayerSpec
from support.rounds import (
    Round,
    check_commit,
    check_verify,
    import_module,
    make_round,
    poison,
    same_bits,
)

pytestmark = pytest.mark.gpu
SPECS = {
    "replay": LayerSpec(),
    "pku": LayerSpec(factors="pku"),
    "bf16-pool": LayerSpec(state_dtype=DType.BF16),
    "odd": LayerSpec(key_heads=30, value_heads=30, d_k=96, d_v=192, state_dtype=DType.BF16),
}
LAYERS = 2


def two_rounds(m: Any, batch: int) -> tuple[Round, Round]:
    """A round and the one after it, on the same slots."""
    trees = None if m.MODULE.parents else [[-1, *((n - 1) // 3 for n in range(1, 40))]] * batch
    made = [
        make_round(m, batch=batch, layers=LAYERS, slots=batch + 1, seed=seed, trees=trees,
                   device="cuda")
        for seed in (0, 1)
    ]  # fmt: skip
    shared = ("state", "conv_state", "slots", "conv_weight", "A_log", "dt_bias")
    return made[0], replace(made[1], **{name: getattr(made[0], name) for name in shared})


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("template", ["(3,3,3)", "any:64"])
def test_folded_rounds_follow_the_recurrence_as_two_steps_do(
    template: str, spec: str, batch: int
) -> None:
    m = import_module(compile_template(template, SPECS[spec], depth=8))
    rounds = two_rounds(m, batch)
    last = [(39, 12, 1, 0, -1, 700)[row % 6] for row in range(batch)]
    before = rounds[0].state, rounds[0].conv_state
    for folded in (False, True):
        pools = before[0].clone(), before[1].clone()
        first, second = (replace(r, state=pools[0], conv_state=pools[1]) for r in rounds)
        old, new = (poison(m.allocate(batch, LAYERS, "cuda")) for _ in range(2))
        for layer in range(LAYERS):
            first.verify(m, old, layer)
        if not folded:
            first.commit(m, old, last)
        options = {"pending": (old, torch.tensor(last, device="cuda"))} if folded else {}
        outs = [second.verify(m, new, layer, **options) for layer in range(LAYERS)]
        check_commit(m, first, old, before, pools, last, LAYERS - 1).assert_within()
        check_verify(m, second, outs[-1], new, LAYERS - 1).assert_within()


def test_two_graphs_in_turn_replay_what_runs_without_them() -> None:
    m = import_module(compile_template("(3,3,3)", depth=8))
    r = two_rounds(m, 4)[0]
    lasts = [[-1] * 4, [39, 12, -1, 0], [1, 20, 30, -1], [0, 39, 2, 13]]
    kinds: list[list[torch.Tensor]] = []
    for captured in (False, True):
        one, held = r.with_clones(), torch.full((4,), -1, device="cuda")
        buffers = [m.allocate(4, LAYERS, "cuda") for _ in range(2)]
        out = torch.empty(4, 40, 32, 128, dtype=r.x.dtype, device="cuda")

        def verify(turn: int, one: Any = one, buffers: Any = buffers, out: Any = out,
                   held: Any = held) -> None:  # fmt: skip
            for layer in range(LAYERS):
                pending = buffers[1 - turn], held
                one.verify(m, buffers[turn], layer, out=out, pending=pending)

        graphs = []
        if captured:
            for turn in range(2):
                verify(turn)
                torch.cuda.synchronize()
                buffers[turn].check = False
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    verify(turn)
                graphs.append(graph)
        outs = []
        for number, last in enumerate(lasts):
            held.copy_(torch.tensor(last))
            graphs[number % 2].replay() if captured else verify(number % 2)
            outs.append(out.clone())
        kinds.append([*outs, one.state, one.conv_state])
    for one_bits, other in zip(*kinds, strict=True):
        assert same_bits(one_bits, other)

"""Right calls that capture CUDA graphs and replay them, to be spoiled: on a GPU alone."""
# mypy: disable-error-code="no-untyped-call"

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bolegen_runtime import CanonicalState, GraphPool, Round, SlotClaims
from support.rounds import same_bits
from support.scene_parts import (
    LAST,
    ROWS,
    ints,
    module,
    operands,
    tracks,
    tree,
    verified,
    weights_of,
)
from support.spoils import Arguments, Scene

__all__ = ["GRAPH_SCENES"]


def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of what has run before, and where it leaves its answer: nothing there yet."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(float("nan"))
    return graph, out


def a_turn(device: str, claims: SlotClaims | None = None) -> tuple[Round, Arguments]:
    """A round that is not begun, and what its verify takes."""
    r = operands(device)
    pools, factors = CanonicalState(r.state, r.conv_state), copy.deepcopy(verified(device))
    of = {"x": r.x[0], "a": r.a[0], "b": r.b[0], "weights": weights_of(r)[0], "layer": 0}
    return Round(module(), pools, factors=factors, claims=claims), {**of, **tree(r)}


def by_captured(device: str) -> Scene:
    """An engine's capture of verify, which has run without a graph before."""
    turn, given = a_turn(device)

    def call(**of: Any) -> torch.Tensor:
        turn.begin(of["slots"])
        want = turn.verify(**of).clone()
        turn.discard()
        graph, out = capture(partial(turn.verify, **of))
        turn.begin(of["slots"])
        turn.replay(graph)
        turn.check_verified()
        assert same_bits(out, want), "the replay is not what ran without a graph"
        return want

    held = vars(turn.canonical), turn.allocated
    return Scene(call, given, held, ("out",), says=("factors", "conv_weight"))


def by_replay(device: str) -> Scene:
    """A round by a graph, from begin to commit."""
    turn, of = a_turn(device, SlotClaims())
    slots = of["slots"]
    turn.begin(slots)
    turn.verify(**of)
    turn.discard()
    graph, _ = capture(partial(turn.verify, **of))
    given = {"graph": graph, "slots": slots, "last_node": ints(LAST, device=device)}

    def call(graph: Any, slots: Any, **last: Any) -> torch.Tensor:
        turn.begin(slots)
        turn.replay(graph)
        turn.commit(slots, **last)
        # and so every operand of the graph lives as long as this call
        out: torch.Tensor = of["out"]
        return out

    held = (vars(turn.canonical),)
    return Scene(call, {**given, **tracks(device)}, held, says=("slot", "factors"))


def by_pool(device: str) -> Scene:
    """A round of a pool whose one graph has a row more."""
    r, claims = operands(device), SlotClaims()
    pool = GraphPool(
        module(), weights_of(r), r.state, r.conv_state, batches=(ROWS + 1,), claims=claims
    )
    pool.capture()
    given = {"x": r.x, "a": r.a, "b": r.b, "slots": r.slots, "parents": r.parents,
             "live": r.live, "counts": ints([3, 2], device=device)}  # fmt: skip
    buffers = {k: v for k, v in vars(pool.buffers).items() if isinstance(v, torch.Tensor)}

    def now() -> Any:
        return pool.round._waiting, sorted(claims._held), len(claims._factors), pool._rows

    held = r.state, r.conv_state, buffers, now
    return Scene(pool.verify, given, held, says=("slot", "first_child", "next_sibling"))


GRAPH_SCENES: dict[str, Callable[[str], Scene]] = {
    "captured verify": by_captured, "Round.replay": by_replay, "GraphPool.verify": by_pool,
}  # fmt: skip

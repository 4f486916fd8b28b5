"""One graph of all layers, replayed round after round on new trees, slots and live nodes."""
# mypy: disable-error-code="no-untyped-call"

import random
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from bolegen_runtime import GraphPool, LayerWeights
from support.judge import Worst, check_commit, check_verify, same_bits
from support.quiet import Noise, listen
from support.rounds import Round, make_round, poison
from support.trees import Row, draw_tree, links_of, walk_links, walk_parents

__all__ = ["Draw", "play_replays"]

NAN = float("nan")


@dataclass
class Draw:
    """One round: what the pool is given, and what a plain walk on the host makes of it."""

    options: dict[str, Any]  # parents or links, live, counts
    slots: torch.Tensor
    trees: list[Row]  # parents of live nodes, -1 elsewhere
    live: list[list[bool]]
    last: list[int]

    @classmethod
    def make(cls, m: ModuleType, numbers: random.Random, rows: int, slots: int) -> "Draw":
        """Random rows of one size: half of them of fewer nodes, some padded, some garbage."""
        n = numbers.randint(1, m.MODULE.nodes)
        given = [draw_tree(numbers, n, m.MODULE.depth) for _ in range(rows)]
        dtype = numbers.choice([torch.int32, torch.int64])
        linked, masked = numbers.random() < 0.5, numbers.random() < 0.5
        # slot 0 belongs to nobody
        used = numbers.sample(range(1, slots), rows)
        used = [slot if numbers.random() > 0.15 else -1 for slot in used]
        counts = [numbers.choice([n, numbers.randint(0, n)]) for _ in range(rows)]
        share = 0.9 if masked else 1.0
        keep = [[numbers.random() < share for _ in range(n)] for _ in given]
        links = [links_of(tree) for tree in given]
        for of in (x for pair in links for x in pair) if linked else given:
            for _ in range(numbers.choice([0, 0, 0, 1, n])):
                of[numbers.randrange(n)] = numbers.randint(-2, n + 1)
        options: dict[str, Any] = {"counts": torch.tensor(counts, device="cuda")}
        if masked:
            options["live"] = torch.tensor(keep, device="cuda")
        walked = []
        for row in range(rows):
            count = counts[row] if used[row] >= 0 else 0
            if linked:
                walked.append(walk_links(*links[row], count, keep[row]))
            else:
                walked.append(walk_parents(given[row], count, keep[row]))
        if linked:
            pairs = zip(*links, strict=True)
            options["links"] = tuple(torch.tensor(x, dtype=dtype, device="cuda") for x in pairs)
        else:
            options["parents"] = torch.tensor(given, dtype=dtype, device="cuda")
        trees, live = [list(x) for x in zip(*(_cut(m, *w) for w in walked), strict=True)]
        last = [_pick(numbers, alive) for alive in live]
        return cls(options, torch.tensor(used, device="cuda"), trees, live, last)


def _cut(m: ModuleType, parents: Row, live: list[bool]) -> tuple[Row, list[bool]]:
    """Garbage can make a tree deeper than the module: it kills what is too deep."""
    levels, live = [0] * len(live), list(live)
    for node in range(1, len(live)):
        if live[node]:
            levels[node] = levels[parents[node]] + 1
            live[node] = live[parents[node]] and levels[node] <= m.MODULE.depth
    return [p if alive else -1 for p, alive in zip(parents, live, strict=True)], live


def _pick(numbers: random.Random, live: list[bool]) -> int:
    """A live node most of the time; nothing, a dead node or none at all otherwise."""
    alive = [node for node, is_live in enumerate(live) if is_live]
    if not alive or numbers.random() < 0.2:
        return numbers.choice([-1, numbers.randrange(len(live)), 10_000])
    return numbers.choice(alive)


def play_replays(
    m: ModuleType,
    *,
    layers: int,
    rounds: int,
    judged: int,
    batches: tuple[int, ...] = (1, 4, 8),
    slots: int = 14,
    seed: int = 0,
) -> dict[str, Any]:
    """Play ``rounds``, each beside eager and the first ``judged`` beside the oracle as well.

    Raises AssertionError where a bit differs, an error is over its limit, or a replay allocates,
    compiles or waits for the device.
    """
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    trees = None if m.MODULE.parents else [[-1] + [0] * (m.MODULE.nodes - 1)] * batches[-1]
    owner = make_round(
        m, batch=batches[-1], layers=layers, slots=slots, trees=trees, device="cuda",
        log_rate=(-6.0, 1.0),
    )  # fmt: skip
    owner.state[:, 0], owner.conv_state[:, 0] = NAN, NAN
    weights = [
        LayerWeights(*of) for of in zip(owner.conv_weight, owner.A_log, owner.dt_bias, strict=True)
    ]
    pool = GraphPool(m, weights, owner.state, owner.conv_state, batches=batches)
    pool.capture()
    player = _Player(m, owner, pool)
    launches = player.count_launches(numbers)
    worst = Worst()
    for number in range(rounds):
        draw = Draw.make(m, numbers, numbers.randint(1, batches[-1]), slots)
        player.play(draw)
        if number < judged:
            worst |= player.judge(draw, layer=numbers.randrange(layers))
    assert player.noise == Noise(), f"a replay is not quiet: {player.noise}"
    worst.assert_within()
    return {
        "module": m.MODULE.name,
        "layers": layers,
        "batches": batches,
        "rounds": rounds,
        "bit-equal to eager": rounds,
        "judged by the oracle": judged,
        "worst error over its limit": worst.ratios,
        "rows": player.counts,
        "allocations": player.noise.allocations,
        "compilations": player.noise.compilations,
        "launches of a round": launches,
    }


class _Player:
    """Plays rounds on one pool, and the same rounds eagerly."""

    def __init__(self, m: ModuleType, owner: Round, pool: GraphPool) -> None:
        self.m, self.owner, self.pool = m, owner, pool
        self.noise, self.counts = Noise(), Counter[str]()
        layers, rows = owner.x.shape[:2]
        self.eager = m.allocate(rows, layers, "cuda")
        self.eager.check = False
        # one kernel after another: no race can hide in both
        self.eager.overlap = False
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None
        self.out: torch.Tensor | None = None

    def play(self, draw: Draw) -> None:
        """One round, and the same one eagerly."""
        rows, n = len(draw.trees), len(draw.trees[0])
        live = torch.tensor(draw.live, device="cuda")
        x, a, b = self._rows(live)
        at = self.pool.buffers
        for tensor in (at.x, at.a, at.b, at.out):
            if tensor is not None:
                tensor.fill_(NAN)
        poison(self.pool.buffers.factors)
        last = torch.tensor(draw.last, device="cuda")
        self.before = self.owner.state.clone(), self.owner.conv_state.clone()
        with listen(self.noise):
            out = self.pool.verify(x, a, b, draw.slots, **draw.options)
        self.out = out.clone()
        with listen(self.noise):
            self.pool.commit(last)
        self._compare(draw, (x, a, b), live, last)
        self.counts["padded"] += int((draw.slots < 0).sum())
        self.counts["all"] += rows
        self.counts["nodes"] += rows * n
        self.counts["dead nodes"] += rows * n - sum(map(sum, draw.live))
        torch.cuda.synchronize()

    def _rows(self, live: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Fresh x, a, b, with NaN in dead nodes and padded rows; views of wider tensors."""
        rows, n = live.shape
        made = []
        for tensor in (self.owner.x, self.owner.a, self.owner.b):
            view = tensor[:, :rows, :n].normal_()
            made.append(view.masked_fill_(~live[None, :, :, None], NAN))
        return tuple(made)

    def _compare(
        self, draw: Draw, rows: tuple[torch.Tensor, ...], live: torch.Tensor, last: torch.Tensor
    ) -> None:
        """The replayed round and its commit against the module's own calls, bit for bit."""
        assert self.before is not None
        assert self.out is not None
        state, window = (t.clone() for t in self.before)
        r = self._round(draw, rows, live, state, window)
        poison(self.eager)
        for layer in range(len(state)):
            out = r.verify(self.m, self.eager, layer)
            assert same_bits(self.out[layer], out), f"layer {layer} differs from eager"
            assert torch.count_nonzero(out[~live]) == 0, "a dead node has an output"
        self.m.commit(self.eager, state, window, draw.slots, last)
        assert same_bits(self.owner.state, state), "a committed state differs from eager"
        assert same_bits(self.owner.conv_state, window), "a committed window differs from eager"
        assert torch.isfinite(state[:, 1:]).all(), "a state is not finite"
        assert torch.isfinite(self.out).all(), "an output is not finite"

    def judge(self, draw: Draw, layer: int) -> Worst:
        """One row of the round just compared, alone, against the float64 oracle."""
        assert self.before is not None
        assert self.out is not None
        row = next((i for i, alive in enumerate(draw.live) if alive[0]), None)
        if row is None:
            return Worst()
        live = torch.tensor(draw.live[row : row + 1], device="cuda")
        n = live.shape[1]
        rows = [t[:, row : row + 1, :n] for t in (self.owner.x, self.owner.a, self.owner.b)]
        was = tuple(t.clone() for t in self.before)
        one = Draw({}, draw.slots[row : row + 1], [draw.trees[row]], [draw.live[row]], [])
        r = self._round(one, tuple(rows), live, *was)
        factors = self.m.allocate(1, len(was[0]), "cuda")
        factors.check = False
        for at in range(len(was[0])):
            out = r.verify(self.m, factors, at)
            if at == layer:
                assert same_bits(out[0], self.out[layer, row]), "a row depends on its mates"
                worst, qkv = (
                    check_verify(self.m, r, out, factors, layer),
                    factors.convolved_rows(layer).clone(),
                )
        after = tuple(t.clone() for t in self.before)
        last = draw.last[row : row + 1]
        self.m.commit(factors, *after, one.slots, torch.tensor(last, device="cuda"))
        slot = int(one.slots[0])
        assert same_bits(after[0][:, slot], self.owner.state[:, slot]), "commit depends on mates"
        return worst | check_commit(
            self.m, r, factors, (was[0], was[1]), (after[0], after[1]), last, layer, qkv=qkv
        )

    def _round(
        self,
        draw: Draw,
        rows: tuple[torch.Tensor, ...],
        live: torch.Tensor,
        state: torch.Tensor,
        window: torch.Tensor,
    ) -> Round:
        """The round as the module's own calls and the judge take it."""
        r, (x, a, b) = self.owner, rows
        # the judge's trees name an earlier node everywhere; of a dead one it reads nothing
        trees = [
            [p if p >= 0 or not i else i - 1 for i, p in enumerate(tree)] for tree in draw.trees
        ]
        return Round(
            x, a, b, r.conv_weight, r.A_log, r.dt_bias, state, window, draw.slots,
            parents=torch.tensor(draw.trees, device="cuda"), live=live, trees=trees,
        )  # fmt: skip

    def count_launches(self, numbers: random.Random) -> dict[str, int]:
        """Kernels, copies and fills of one round of the largest batch, by torch's profiler."""
        rows = self.pool.batches[-1]
        draw = Draw.make(self.m, numbers, rows, self.owner.state.shape[1])
        x, a, b = self._rows(torch.tensor(draw.live, device="cuda"))
        last = torch.tensor(draw.last, device="cuda")
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.pool.verify(x, a, b, draw.slots, **draw.options)
            self.pool.commit(last)
            torch.cuda.synchronize()
        found = Counter[str]()
        for event in profile.events():
            if str(event.device_type).endswith("CUDA"):
                kernel = event.name.partition("_")[0]
                ours = kernel in ("trace", "prepare", "factor", "solve", "commit")
                if event.name == "trace_tree":
                    kernel = "topology"
                found[kernel if ours else "copies and fills"] += 1
        assert found, "the profiler saw no kernel; may this user count on this GPU?"
        return dict(found)

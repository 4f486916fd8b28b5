"""The ablation's middle step: stored states and their commit, against the module's own commit."""

import torch

from benchmarks.engine.snapshots import commit_states, write_states
from support.rounds import build, make_round, poison

TREES = [[-1, 0, 0, 1, 1, 3, 2, 5], [-1, 0, 1, 2, 3, 0, 5, 0]]


def test_every_node_has_its_state_and_the_accepted_one_is_committed() -> None:
    m = build("any:8", depth=7, factors="pku")
    (_, heads), (d_k, d_v) = m.MODULE.heads, m.MODULE.dims
    for nodes in ([0, 1], [3, 4], [7, 7], [-1, 6]):
        r = make_round(m, trees=TREES, layers=2)
        factors = poison(m.allocate(2, 2, "cpu"))
        kept = torch.full((2, 2, 8, heads, d_v, d_k), float("nan"))
        for layer in range(2):
            r.verify(m, factors, layer)
            write_states(m, factors, layer, r.state[layer], r.slots, kept[layer])
        own = r.with_clones()
        own.commit(m, factors, nodes)
        last = torch.tensor(nodes)
        commit_states(m, factors, kept, r.state, r.conv_state, r.slots, last)
        assert torch.equal(r.conv_state, own.conv_state)
        torch.testing.assert_close(r.state, own.state, rtol=1e-5, atol=1e-6)

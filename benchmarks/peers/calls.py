# mypy: allow-untyped-calls
"""The peers' kernels, called as SGLang's server calls them for a draft tree of GDN layers."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.operands import Operands, split_rows
from benchmarks.peers.fetch import FOLDER
from benchmarks.reference import Exact, over_relative
from benchmarks.systems import System

__all__ = ["CONV_MAX_NODES", "OUTPUT_LIMIT", "Commit", "Replay", "Serial", "load"]

# SGLang's tree convolution is unrolled over the nodes: 10 s to compile at 40, minutes above
CONV_MAX_NODES = 48
# its kernel is compiled anew for every size of the pool
_CONV_SLOTS = 40
_SNAPSHOT_BYTES = 24 << 30

# relative errors, in norms over a head: outputs carry one bf16 rounding (1.7e-3); states do not;
# bf16 snapshots round at every node, and bf16 products in the convolution err by 2.5e-3
OUTPUT_LIMIT, _STATE, _CONV = 4e-3, 1e-5, 5e-3
_BF16_SNAPSHOTS, _CORE = 3e-2, 3e-2


def load(name: str) -> Any:
    """One of the modules that fetch.py laid out, by its name below ``sglang.kernels.ops``."""
    if not (FOLDER / "sglang/kernels/ops" / f"{name.replace('.', '/')}.py").is_file():
        raise FileNotFoundError(f"no peer {name} here; run `python benchmarks/peers/fetch.py`")
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(f"sglang.kernels.ops.{name}")


class Serial:
    """SGLang: tree convolution, then node by node with a snapshot of the state a node."""

    def __init__(self, r: Operands, exact: Callable[[int], Exact]) -> None:
        self.r, self.exact = r, exact
        self.update = load(
            "attention.linear.fused_sigmoid_gating_recurrent"
        ).fused_sigmoid_gating_delta_rule_update
        self.conv = load("mamba.causal_conv1d_triton").causal_conv1d_update
        batch, nodes, device = r.case.batch, len(r.parents), r.x.device
        index: dict[str, Any] = {"dtype": torch.int32, "device": device}
        links = [torch.tensor([of] * batch, **index) for of in _links(r.parents)]
        self.parent, self.child, self.sibling = links
        self.found = torch.zeros_like(self.parent)
        self.ends = torch.arange(0, (batch + 1) * nodes, nodes, **index)
        self.requests = torch.arange(batch, **index)
        pool = (batch, nodes, *r.state.shape[2:])
        one = r.state.element_size() * torch.Size(pool).numel()
        kept = max(1, min(r.sets, _SNAPSHOT_BYTES // one))
        self.snapshots = torch.empty(kept, *pool, dtype=r.state.dtype, device=device)

    def solve(self) -> System:
        """The recurrence alone, on convolved rows."""
        return System("sglang.solve", self._solve, self._judge_solve, self._poison)

    def core(self) -> System:
        """Convolution and recurrence."""
        self.make_windows()
        return System("sglang.core", self.run_layer, self.judge_core, self.restore)

    def convolution(self) -> System:
        """The convolution alone."""
        self.make_windows()
        return System("sglang.conv", self.convolve, self._judge_conv, self.restore)

    def convolve(self, i: int) -> torch.Tensor:
        """Convolved rows [B, T, C]; overwrites the committed windows, as SGLang's does."""
        links = {
            "retrieve_next_token": self.child,
            "retrieve_next_sibling": self.sibling,
            "retrieve_parent_token": self.found,
        }
        out: torch.Tensor = self.conv(
            self.r.x[i].transpose(1, 2),
            self.windows[i],
            self.r.weight,
            self.r.bias,
            "silu",
            conv_state_indices=self.r.slots,
            intermediate_conv_window=self.taken[i],
            intermediate_state_indices=self.requests,
            **({} if self.r.case.chain else links),
        )
        return out.transpose(1, 2)

    def recur(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Outputs [B, T, Hv, dv] of convolved rows."""
        r = self.r
        q, k, v = split_rows(r.case, rows.reshape(1, -1, rows.shape[-1]))
        out: torch.Tensor = self.update(
            q=q,
            k=k,
            v=v,
            initial_state_source=r.state[i],
            initial_state_indices=r.slots,
            cu_seqlens=self.ends,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            disable_state_update=True,
            intermediate_states_buffer=self.snapshots[i % len(self.snapshots)],
            intermediate_state_indices=self.requests,
            cache_steps=len(r.parents),
            retrieve_parent_token=None if r.case.chain else self.parent,
            **self.gates(i),
        )
        return out.view(r.case.batch, len(r.parents), *v.shape[2:])

    def gates(self, i: int) -> dict[str, Any]:
        """What the recurrence is given of one layer's gates."""
        r = self.r
        a, b = (each[i].flatten(0, 1) for each in (r.a, r.b))
        return {"A_log": r.A_log, "dt_bias": r.dt_bias, "a": a, "b": b, "is_kda": False}

    def _solve(self, i: int) -> torch.Tensor:
        return self.recur(i, self.r.rows[i])

    def run_layer(self, i: int) -> torch.Tensor:
        """Convolution and recurrence of one layer."""
        self.convolved = self.convolve(i)  # the last alone is kept: a server would free it
        return self.recur(i, self.convolved)

    def make_windows(self) -> None:
        """A copy of the committed windows, and room for one a node."""
        r = self.r
        self.windows = r.windows.new_zeros(r.sets, _CONV_SLOTS, *r.windows.shape[2:])
        self.taken = r.windows.new_empty(r.sets, *r.x.shape[1:], r.windows.shape[-1])

    def restore(self) -> None:
        """Windows as drawn, snapshots NaN."""
        self.windows[:, : self.r.windows.shape[1]] = self.r.windows
        self._poison()

    def _poison(self) -> None:
        self.snapshots.fill_(torch.nan)

    def _judge_solve(self, i: int, out: torch.Tensor) -> dict[str, float]:
        exact, r = self.exact(i), self.r
        full = r.state.dtype == torch.float32
        committed = self.snapshots[i % len(self.snapshots)][self.requests.long(), r.last]
        limits = (OUTPUT_LIMIT, _STATE) if full else (_BF16_SNAPSHOTS, _BF16_SNAPSHOTS)
        return {
            "o": over_relative(out, exact.o, (1, 3), limits[0]),
            "state": over_relative(committed, exact.state, (2, 3), limits[1]),
        }

    def judge_core(self, i: int, out: torch.Tensor) -> dict[str, float]:
        """Outputs of one layer, and the rows that were convolved last."""
        full = self.r.state.dtype == torch.float32
        limit = _CORE if full else _BF16_SNAPSHOTS
        found = {"o": over_relative(out, self.exact(i).o, (1, 3), limit)}
        return found | self._judge_conv(i, self.convolved)

    def _judge_conv(self, i: int, rows: torch.Tensor) -> dict[str, float]:
        found = {"conv": over_relative(rows, self.r.rows[i].double(), (1, 2), _CONV)}
        if not self.r.case.chain:
            found["links"] = 0.0 if torch.equal(self.found, self.parent) else torch.inf
        return found


class Replay:
    """ReplaySSM's verify of chains, with ``held`` earlier steps in its ring of 16."""

    def __init__(self, serial: Serial, held: int) -> None:
        self.serial, self.r, self.held = serial, serial.r, held
        r, shape = self.r, self.r.case.shape
        self.verify = load("attention.linear.gdn_replayssm_spec_decode").gdn_replayssm_spec_decode
        slots = r.state.shape[1]

        def ring(heads: int, *size: int, dtype: torch.dtype = r.x.dtype) -> torch.Tensor:
            return torch.zeros(r.sets, slots, heads, 16, *size, dtype=dtype, device=r.x.device)

        values = ring(shape.value_heads, shape.d_v), ring(shape.value_heads, shape.d_v)
        keys = ring(shape.key_heads, shape.d_k), ring(shape.key_heads, shape.d_k)
        gates = ring(shape.value_heads, dtype=torch.float32)
        self.rings = {
            "d_cache": values[0], "k_cache": keys[0], "g_cache": gates,
            "rawv_cache": values[1], "rawk_cache": keys[1],
        }  # fmt: skip
        index: dict[str, Any] = {"dtype": torch.int32, "device": r.x.device}
        self.cursors = {
            "write_pos": torch.full((slots,), held, **index),
            "cache_base": torch.zeros(slots, **index),
            "is_flush": torch.zeros(slots, dtype=torch.int8, device=r.x.device),
        }
        nodes = r.case.batch * len(r.parents)
        self.out = r.x.new_empty(r.sets, nodes, shape.value_heads, shape.d_v)

    def solve(self) -> System:
        """The recurrence alone, on convolved rows."""
        return System(f"replayssm{self.held}.solve", self._solve, self._judge, self._clear)

    def core(self) -> System:
        """SGLang's convolution before it."""
        self.serial.make_windows()
        return System(f"replayssm{self.held}.core", self._core, self._judge_core, self._restore)

    def _solve(self, i: int) -> torch.Tensor:
        return self._recur(i, self.r.rows[i])

    def _core(self, i: int) -> torch.Tensor:
        return self._recur(i, self.serial.convolve(i))

    def _recur(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        r = self.r
        q, k, v = split_rows(r.case, rows.reshape(-1, rows.shape[-1]))
        self.verify(
            q=q, k=k, v=v, a=r.a[i].flatten(0, 1), b=r.b[i].flatten(0, 1), A_log=r.A_log,
            dt_bias=r.dt_bias, checkpoint_state=r.state[i], beta_cache=None, out=self.out[i],
            query_start_loc=self.serial.ends, ssm_state_indices=r.slots,
            replay_indices=self.serial.requests, max_cache_len=16, max_spec_len=len(r.parents),
            use_qk_l2norm_in_kernel=True, null_block_id=-1, launch_mode="verify",
            **{name: ring[i] for name, ring in self.rings.items()}, **self.cursors,
        )  # fmt: skip
        return self.out[i].view(r.case.batch, len(r.parents), *v.shape[1:])

    def _clear(self) -> None:
        """An empty ring; steps held in it are zeros, which change the time and no result."""
        self.out.fill_(torch.nan)
        for ring in self.rings.values():
            ring.zero_()

    def _restore(self) -> None:
        self._clear()
        self.serial.restore()

    def _judge(self, i: int, out: torch.Tensor) -> dict[str, float]:
        return {"o": over_relative(out, self.serial.exact(i).o, (1, 3), 2 * OUTPUT_LIMIT)}

    def _judge_core(self, i: int, out: torch.Tensor) -> dict[str, float]:
        return {"o": over_relative(out, self.serial.exact(i).o, (1, 3), _CORE)}


class Commit:
    """SGLang's two scatters: accepted snapshots of states and of windows, all layers."""

    steps = 8  # how many nodes have a snapshot changes nothing of what is copied

    def __init__(self, r: Operands) -> None:
        module = load("mamba.mamba_state_scatter_triton")
        self.scatter = module.fused_mamba_state_scatter_with_mask
        self.scatter_windows = module.fused_conv_window_scatter_multi
        self.r, batch = r, r.case.batch
        self.pools = torch.empty_like(r.state), torch.empty_like(r.windows)
        self.taken = tuple(
            pool.new_empty(r.sets, batch, self.steps, *pool.shape[2:]).normal_()
            for pool in self.pools
        )
        self.requests = torch.arange(batch, device=r.x.device)
        self.nodes = (self.requests % self.steps).to(torch.int32)

    def commit(self) -> System:
        """Both scatters."""
        return System("sglang.commit", self._commit, self._judge, self._clear, self.r.sets)

    def _commit(self, _: int) -> torch.Tensor:
        self.scatter_all()
        return self.pools[0]

    def scatter_all(self) -> None:
        """Both scatters of all layers."""
        (states, windows), (snapshots, taken) = self.pools, self.taken
        self.scatter(states, snapshots, self.r.slots, self.nodes)
        self.scatter_windows([(windows, taken)], self.r.slots, self.nodes)

    def _clear(self) -> None:
        for pool in self.pools:
            pool.zero_()  # the slot that nothing is committed to is compared as well

    def _judge(self, _: int, __: torch.Tensor) -> dict[str, float]:
        slots, nodes = self.r.slots.long(), self.nodes.long()
        same = all(
            torch.equal(pool[:, slots], taken[:, self.requests, nodes])
            for pool, taken in zip(self.pools, self.taken, strict=True)
        )
        return {"state": 0.0 if same else torch.inf}


def _links(parents: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    """Each node's parent (0 for the root), first child and next sibling, -1 where none."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    youngest: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent in youngest:
            sibling[youngest[parent]] = node
        elif parent >= 0:
            child[parent] = node
        youngest[parent] = node
    return [max(0, parent) for parent in parents], child, sibling

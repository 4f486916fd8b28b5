"""What a round takes, in bytes, before it runs: by lifetime, beside an engine's snapshots."""

from dataclasses import dataclass, replace

from bolegen.codegen import Lifetime, list_buffers
from bolegen.errors import SpecError
from bolegen.ir import TreePlan

__all__ = ["MemoryPlan", "Share", "plan_memory", "show_memory"]

GB = 10**9
_LIMIT = 1_000_000
_ROWS = {
    "states": "a slot each in the pools",
    "factors": "until acceptance",
    "scratch": "one layer's, reused by all",
    "folded": "factors and scratch again, where verify commits the round before",
    "graphs": "in and out of a GraphPool, if one is used",
    "snapshots": "what engines keep in place of factors",
}


@dataclass(frozen=True)
class Share:
    """Bytes of one lifetime: ``request`` for each request, ``fixed`` whatever their number."""

    request: int
    fixed: int
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of ``batch`` requests in ``layers`` recurrent layers; see docs/memory.md.

    ``states``: one slot a request of the engine's pools, state and convolution window.
    ``factors``: until acceptance, and ``scratch``: one layer's; the two are all that the module's
    allocate(batch, layers) takes. ``folded``: a second allocate, where commit is left to the next
    verify. ``graphs``: arguments and outputs of a GraphPool, where one is
    used. ``snapshots``: a state and a window a node, what engines keep in place of factors.
    """

    plan: TreePlan
    layers: int
    batch: int

    @property
    def states(self) -> Share:
        """The committed state and convolution window of every request."""
        return self._each(self.layers * self.plan.spec.snapshot_bytes)

    @property
    def factors(self) -> Share:
        """Factors.round_bytes of the module."""
        return self._share(Lifetime.ROUND)

    @property
    def scratch(self) -> Share:
        """Factors.scratch_bytes of the module."""
        return self._share(Lifetime.SCRATCH)

    @property
    def folded(self) -> Share:
        """The other buffer of two rounds that are alive at once."""
        one, two = self.factors, self.scratch
        return Share(one.request + two.request, one.fixed + two.fixed, one.total + two.total)

    @property
    def graphs(self) -> Share:
        """bolegen_runtime.RoundBuffers without its factors."""
        spec, nodes = self.plan.spec, self.plan.tree.nodes
        rows = spec.channels + spec.operands + spec.value_heads * spec.d_v
        parents = 0 if self.plan.tree.is_static else 4
        # x, a, b and out a layer; live, counted and parents a node; slots and last_node a request
        node = self.layers * rows * spec.dtype.bytes + 2 + parents
        request, order = nodes * node + 2 * 8, nodes * 8
        return Share(request, order, self.batch * request + order)

    @property
    def snapshots(self) -> Share:
        """A state in the pool's dtype and a window for each node, in place of factors."""
        return self._each(self.layers * self.plan.tree.nodes * self.plan.spec.snapshot_bytes)

    def count_requests(self, memory_bytes: int, *, snapshots: bool = False) -> int:
        """How many requests fit into ``memory_bytes`` with their states and nothing else.

        With factors and scratch, or with snapshots; weights, KV cache and activations are not
        counted.
        """
        if type(memory_bytes) is not int:
            raise SpecError(f"memory_bytes {memory_bytes!r} must be a whole number")
        least, most = 0, memory_bytes // self.states.request
        while least < most:
            middle = (least + most + 1) // 2
            if replace(self, batch=middle)._held(snapshots) <= memory_bytes:
                least = middle
            else:
                most = middle - 1
        return least

    def _held(self, snapshots: bool) -> int:
        parts = (self.snapshots,) if snapshots else (self.factors, self.scratch)
        return self.states.total + sum(part.total for part in parts)

    def _each(self, request: int) -> Share:
        return Share(request, 0, self.batch * request)

    def _share(self, lifetime: Lifetime) -> Share:
        buffers = [b for b in list_buffers(self.plan) if b.lifetime is lifetime]
        request = sum(buffer.row_bytes(self.layers) for buffer in buffers)
        total = sum(buffer.bytes(self.batch, self.layers) for buffer in buffers)
        return Share(request, total - self.batch * request, total)


def plan_memory(plan: TreePlan, *, layers: int, batch: int) -> MemoryPlan:
    """The memory of the module that ``plan`` compiles to. Raises SpecError for the numbers."""
    if not isinstance(plan, TreePlan):
        raise SpecError(f"plan must be a TreePlan, not {type(plan).__name__}")
    for name, value in (("layers", layers), ("batch", batch)):
        if type(value) is not int or not 1 <= value <= _LIMIT:
            raise SpecError(f"{name} {value} must be 1 to {_LIMIT:,}")
    return MemoryPlan(plan, layers, batch)


def show_memory(memory: MemoryPlan, gpu_gb: float | None = None) -> str:
    """The plan as a table; with ``gpu_gb`` (10^9 bytes), how many requests that holds as well.

    Raises SpecError for a memory that is not positive.
    """
    known = gpu_gb is None or (isinstance(gpu_gb, int | float) and 0 < gpu_gb <= _LIMIT)
    if not known:
        raise SpecError(f"GPU memory {gpu_gb} must be more than 0 GB and at most {_LIMIT:,}")
    tree = memory.plan.tree
    count = "" if tree.is_static else "at most "
    what = f"{memory.batch} request{'' if memory.batch == 1 else 's'}"
    lines = [
        f"{what} of {count}{tree.nodes} nodes in {memory.layers} layers, bytes",
        f"{'':10}{'a request':>16}{'fixed':>14}{'total':>18}",
    ]
    for name, said in _ROWS.items():
        share: Share = getattr(memory, name)
        row = f"{name:10}{share.request:16,}{share.fixed:14,}{share.total:18,}"
        lines.append(f"{row}  {said}")
    factors, scratch = memory.factors.total, memory.scratch.total
    kept = memory.snapshots.total
    lines.append(
        f"factors are {kept / factors:.1f} times smaller than snapshots, "
        f"with scratch {kept / (factors + scratch):.1f} times"
    )
    if gpu_gb is not None:
        given = int(gpu_gb * GB)
        ours, theirs = (memory.count_requests(given, snapshots=s) for s in (False, True))
        lines.append(
            f"{gpu_gb:g} GB hold {ours:,} requests with factors and scratch, {theirs:,} with "
            "snapshots; states are counted, weights, KV cache and activations are not"
        )
    return "\n".join(lines)

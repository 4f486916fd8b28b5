"""Choose tile sizes under the target's shared memory."""

from dataclasses import replace

from bolegen.errors import SpecError
from bolegen.ir import PORTABLE_SMEM, Tiling, TreePlan

__all__ = ["tile_values"]


def tile_values(plan: TreePlan) -> TreePlan:
    """Tiling: smallest -> the widest value tile that fits. 64 wide at d 128 and T = 40.

    Fits means shared memory (the smallest of all targets unless one is named) and registers:
    the solve keeps one tile [b_v, columns] and one [b_v, d_k] on chip.
    """
    smem = plan.target.smem_bytes if plan.target else PORTABLE_SMEM
    d_k = _power(plan.spec.d_k)
    widest = min(64, _power(plan.spec.d_v))
    b_r = min(32, min(block.rows for block in plan.blocks))
    while widest >= 16:
        if widest * max(plan.column_count, d_k) <= 64 * 128 and _smem(plan, widest) <= smem:
            tiling = Tiling(b_n=16, b_r=b_r, b_v=widest)
            return replace(plan, tiling=tiling)
        widest //= 2
    if _smem(plan, 16) <= smem:
        return replace(plan, tiling=Tiling(b_n=16, b_r=b_r, b_v=16))
    name = plan.target.name if plan.target else "every target"
    raise SpecError(
        f"blocks of {max(b.rows for b in plan.blocks)} nodes at dk={plan.spec.d_k} need "
        f"{_smem(plan, 16)} bytes of shared memory, {name} has {smem}; use --solver substitution"
    )


def _smem(plan: TreePlan, b_v: int) -> int:
    """Operands of one product staged at once, in bytes: an upper estimate for the solve."""
    rows = max(block.rows for block in plan.blocks)
    d_k = _power(plan.spec.d_k)
    state = d_k * rows * plan.spec.dtype.bytes + b_v * d_k * 4
    solve = rows * rows * 4 + b_v * rows * 4
    return max(state, solve)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())

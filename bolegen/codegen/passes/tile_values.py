"""Choose tile sizes under the target's shared memory."""

from dataclasses import replace

from bolegen.codegen.cut import power, tiles_of
from bolegen.errors import SpecError
from bolegen.ir import PORTABLE_SMEM, Decay, Tiling, TreePlan

__all__ = ["tile_values"]

_WRITTEN_OUT = 100  # products of Y's column blocks that one kernel may hold


def tile_values(plan: TreePlan) -> TreePlan:
    """Tiling: smallest -> the widest value tile that fits. 64 wide at d 128 and T = 40.

    Fits means shared memory (the smallest of all targets unless one is named) and registers:
    the solve keeps one tile [b_v, columns] and the products [b_v, 2 rows] on chip.
    """
    smem = plan.target.smem_bytes if plan.target else PORTABLE_SMEM
    d_k = power(plan.spec.d_k, 16)
    b_v = min(64, power(plan.spec.d_v, 16))
    while b_v > 16 and (b_v * max(plan.column_count, d_k) > 64 * 128 or _smem(plan, b_v) > smem):
        b_v //= 2
    if _smem(plan, b_v) > smem:
        name = plan.target.name if plan.target else "every target"
        raise SpecError(
            f"blocks of {max(b.rows for b in plan.blocks)} nodes at dk={plan.spec.d_k} need "
            f"{_smem(plan, b_v)} bytes of shared memory, {name} has {smem}; "
            "use --solver substitution"
        )
    small = plan.rows <= 64
    # a cap on registers pays where the code nearly fits under it: products of bf16 operands
    walk_cap = None
    cap = (128 if small else 168) if plan.precision.state_terms else 255
    if plan.precision.state_terms and plan.spec.mixer.decay is Decay.CHANNEL:
        cap = 168  # its decayed operands fill shared memory first
        walk_cap = 128 if small else None
    b_r = min(plan.row_tile, power(plan.rows, 16))
    rolled = _is_rolled(plan, b_r)
    mixer = plan.spec.mixer
    shares = (
        mixer.delta
        and mixer.decay is not Decay.CHANNEL
        and len(plan.columns) == 1
        and plan.rows <= b_r
    )
    tiling = Tiling(
        b_r=b_r,
        b_v=b_v,
        b_k=min(32, d_k),
        b_t=_commit_rows(plan, d_k),
        merge_batch=0 if rolled else 1,
        heads=plan.spec.ratio if shares else 1,
        maxnreg=cap,
        maxnreg_factor=walk_cap,
        fused=plan.rows <= 96,
        rolled=rolled,
    )
    precision = plan.precision
    if rolled and plan.spec.readout == "bf16":
        raise SpecError(
            f"readout bf16 is not there for trees of {plan.tree.nodes} nodes: their column blocks "
            "run in loops, which read Y back in float32; use readout split"
        )
    if rolled:
        precision = replace(precision, readout_terms=0, fold=None)
    return replace(plan, tiling=tiling, precision=precision)


def _is_rolled(plan: TreePlan, b_r: int) -> bool:
    """Whether Y's column blocks run in loops, on tiles that are read back in float32."""
    blocks = len(plan.columns)
    products = tiles_of(plan.rows, b_r) * blocks * (blocks + 1) // 2
    return products > _WRITTEN_OUT and all(block.inverted for block in plan.columns)


def _commit_rows(plan: TreePlan, d_k: int) -> int:
    """Rows of a state in a program of one warp: 128 values a thread; 64 where a tracked state is
    held as well, or keys take the registers.
    """
    values = 4096 if plan.spec.factors == "replay" and d_k <= 128 else 2048
    return min(values // d_k, 64, power(plan.spec.d_v, 16))


def _smem(plan: TreePlan, b_v: int) -> int:
    """Operands of one product staged at once, in bytes: an upper estimate for the solve."""
    rows = max(block.rows for block in plan.blocks)
    b_k = min(32, power(plan.spec.d_k, 16))
    state = b_k * 2 * rows * plan.spec.dtype.bytes + b_v * b_k * 4
    solve = rows * rows * 4 + b_v * rows * 4
    return 2 * max(state, solve)

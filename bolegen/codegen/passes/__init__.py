"""The passes, in order; each is a pure function from a runnable plan to a runnable plan."""

from bolegen.codegen.passes.choose_precision import choose_precision
from bolegen.codegen.passes.choose_solver import choose_solver
from bolegen.codegen.passes.drop_powers import drop_powers
from bolegen.codegen.passes.order_nodes import order_nodes
from bolegen.codegen.passes.split_blocks import split_blocks
from bolegen.codegen.passes.tile_values import tile_values

__all__ = ["PASSES"]

PASSES = (
    drop_powers,
    choose_solver,
    order_nodes,
    split_blocks,
    choose_precision,
    tile_values,
)

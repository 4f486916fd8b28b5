"""From a template to the text of a Triton module; see pipeline.py."""

from bolegen.codegen.buffers import Buffer, Lifetime, list_buffers
from bolegen.codegen.emit import EmittedModule, describe_numerics, write_module
from bolegen.codegen.lower import lower_plan
from bolegen.codegen.passes import PASSES
from bolegen.codegen.pipeline import compile_plan, compile_template, plan_template

__all__ = [
    "PASSES",
    "Buffer",
    "EmittedModule",
    "Lifetime",
    "compile_plan",
    "compile_template",
    "describe_numerics",
    "list_buffers",
    "lower_plan",
    "plan_template",
    "write_module",
]

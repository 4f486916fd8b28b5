"""bolegen compiles draft-tree templates into Triton verifiers for linear-attention layers."""

from bolegen.codegen import EmittedModule, compile_template
from bolegen.errors import BolegenError
from bolegen.ir import LayerSpec, Target, TreeTemplate

__all__ = [
    "BolegenError",
    "EmittedModule",
    "LayerSpec",
    "Target",
    "TreeTemplate",
    "compile_template",
]
__version__ = "0.1.0"

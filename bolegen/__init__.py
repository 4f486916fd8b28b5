"""bolegen compiles draft-tree templates into Triton verifiers for linear-attention layers."""

from bolegen.codegen import EmittedModule, compile_template
from bolegen.errors import BolegenError
from bolegen.ir import LayerSpec, Target, TreeTemplate
from bolegen.version import __version__

__all__ = [
    "BolegenError",
    "EmittedModule",
    "LayerSpec",
    "Target",
    "TreeTemplate",
    "__version__",
    "compile_template",
]

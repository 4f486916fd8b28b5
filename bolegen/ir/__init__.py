"""The intermediate representation: trees, layer shapes, plans, kernels; frozen values only."""

from bolegen.ir.check import check_module, check_plan
from bolegen.ir.kernel import Kernel, KernelModule, Param
from bolegen.ir.mixer import (
    DELTANET,
    GDN,
    GDN_NEG,
    KDA,
    KDA_BOUNDED,
    LIGHTNING,
    MAMBA2,
    MIXERS,
    Decay,
    Mixer,
    find_mixer,
)
from bolegen.ir.notation import NOTATIONS, parse_template, slug, spell_template
from bolegen.ir.plan import Block, Precision, Solver, Tiling, TreePlan, plan_tree
from bolegen.ir.show import draw_svg, show_tree
from bolegen.ir.spec import (
    CONTRACTS,
    FACTOR_LAYOUTS,
    PORTABLE_SMEM,
    READOUTS,
    TARGETS,
    DType,
    LayerSpec,
    Target,
    find_target,
)
from bolegen.ir.tree import MAX_NODES, TreeTemplate

__all__ = [
    "CONTRACTS",
    "DELTANET",
    "FACTOR_LAYOUTS",
    "GDN",
    "GDN_NEG",
    "KDA",
    "KDA_BOUNDED",
    "LIGHTNING",
    "MAMBA2",
    "MAX_NODES",
    "MIXERS",
    "NOTATIONS",
    "PORTABLE_SMEM",
    "READOUTS",
    "TARGETS",
    "Block",
    "DType",
    "Decay",
    "Kernel",
    "KernelModule",
    "LayerSpec",
    "Mixer",
    "Param",
    "Precision",
    "Solver",
    "Target",
    "Tiling",
    "TreePlan",
    "TreeTemplate",
    "check_module",
    "check_plan",
    "draw_svg",
    "find_mixer",
    "find_target",
    "parse_template",
    "plan_tree",
    "show_tree",
    "slug",
    "spell_template",
]

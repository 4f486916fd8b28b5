"""The command line: bolegen compile | show | plan | prove | check | cache | doctor."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from bolegen.codegen import (
    EmittedModule,
    compile_plan,
    describe_numerics,
    plan_template,
    write_module,
)
from bolegen.errors import BolegenError, OutputError, SpecError, TreeError
from bolegen.ir import (
    CONTRACTS,
    FACTOR_LAYOUTS,
    NOTATIONS,
    READOUTS,
    TARGETS,
    DType,
    LayerSpec,
    Solver,
    Target,
    TreePlan,
    draw_svg,
    find_mixer,
    find_target,
    parse_template,
    show_tree,
)
from bolegen.memory import plan_memory, show_memory
from bolegen.models import MODELS, find_model
from bolegen.version import __version__

__all__ = ["main"]

_MODEL = "qwen3.5-9b"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 2 a mistake of the user's, 1 a failure of ours.

    Errors are one line on stderr, and nothing is written then.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (TreeError, SpecError) as error:
        return _complain(error, 2)
    except (BolegenError, OSError) as error:
        return _complain(error, 1)
    return 0


def _complain(error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    print(f"bolegen: {text}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Argument errors as one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bolegen: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bolegen", description="Compile draft-tree verifiers for hybrid models.")
    parser.add_argument("--version", action="version", version=f"bolegen {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)

    compiler = commands.add_parser("compile", help="write the Triton module of a template")
    _add_template(compiler)
    _add_layer(compiler)
    compiler.add_argument("--target", metavar="ARCH", help=f"tune and build for {_list(TARGETS)}")
    compiler.add_argument("--out", type=Path, default=Path("generated"), metavar="DIR")
    compiler.set_defaults(run=_compile)

    shower = commands.add_parser("show", help="print a tree, its ancestor mask and the numerics")
    _add_template(shower)
    _add_layer(shower)
    shower.add_argument("--svg", type=Path, metavar="FILE", help="draw it to FILE as well")
    shower.set_defaults(run=_show)

    planner = commands.add_parser("plan", help="print the memory of a round, beside snapshots")
    _add_template(planner)
    _add_layer(planner)
    planner.add_argument("--layers", type=int, metavar="L", help="recurrent layers (the model's)")
    planner.add_argument("--batch", type=int, default=1, metavar="B", help="requests (1)")
    planner.add_argument("--gpu-mem", type=float, metavar="GB", help="how many requests fit GB")
    planner.set_defaults(run=_plan)

    prover = commands.add_parser("prove", help="prove a compiled template equal to the recurrence")
    _add_template(prover)
    prover.add_argument("--mixer", default="gdn")
    prover.add_argument("--solver", choices=[s.value for s in Solver])
    prover.set_defaults(run=_prove)

    checker = commands.add_parser("check", help="compare generated/ with what is emitted now")
    checker.add_argument("--write", action="store_true", help="refresh it instead")
    checker.add_argument("--dir", type=Path, default=Path("generated"))
    checker.set_defaults(run=_check)

    cache = commands.add_parser("cache", help="list or delete the modules that the runtime keeps")
    cache.add_argument("action", choices=["list", "clear"])
    cache.add_argument("--dir", type=Path, metavar="DIR", help="BOLEGEN_CACHE_DIR by default")
    cache.set_defaults(run=_cache)

    doctor = commands.add_parser("doctor", help="print versions, device and what works here")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--template", required=True, metavar="TREE", help=NOTATIONS)
    parser.add_argument("--depth", type=int, metavar="D", help="largest depth supported, in edges")


def _add_layer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"shapes of {_list(MODELS)}")
    add("--mixer", metavar="NAME", help="the model's by default")
    add("--heads", metavar="HK:HV", help="key and value heads (16:32)")
    add("--dims", metavar="DK:DV", help="key and value dims (128:128)")
    add("--conv", type=int, metavar="W", help="convolution width, 2 to 4 (4)")
    add("--dtype", choices=[d.value for d in DType], default="bf16", help="of activations")
    add("--state-dtype", choices=["fp32", "bf16"], default="fp32", help="of the state pool")
    add("--factors", choices=FACTOR_LAYOUTS, default="replay")
    add("--contract", choices=CONTRACTS, default="fp32", help="tf32 trades accuracy for speed")
    add("--readout", choices=READOUTS, default="split", help="bf16 trades O's accuracy for speed")
    add("--solver", choices=[s.value for s in Solver], help="chosen from the tree by default")


def _plan_tree(options: argparse.Namespace, target: Target | None = None) -> TreePlan:
    solver = Solver(options.solver) if options.solver else None
    spec = _layer(options)
    plan = plan_template(options.template, spec, depth=options.depth, target=target, solver=solver)
    own = find_model(options.model or _MODEL).mixer.name
    if options.model and own != spec.mixer.name:
        said = f"{options.model} has {own}; --mixer {spec.mixer.name} is taken"
        print(f"bolegen: {said}", file=sys.stderr)
    return plan


def _compile(options: argparse.Namespace) -> None:
    target = find_target(options.target) if options.target else None
    module = compile_plan(_plan_tree(options, target))
    built = _build_table(module, options.target) if target else ""
    path = write_module(module, options.out)
    print(_summary(module))
    if built:
        print(built)
    print(f"wrote     {path}")


def _summary(module: EmittedModule) -> str:
    """What compile did, a line each."""
    plan, spec = module.plan, module.plan.spec
    ratio = spec.snapshot_bytes / spec.factor_bytes
    count = "" if plan.tree.is_static else "at most "
    lines = [
        f"module    {module.name}, digest {module.digest}",
        f"nodes     {count}{plan.tree.nodes}, depth {plan.depth} supported",
        *_say_solve(plan),
        f"factors   {spec.factors}, {spec.factor_bytes:,} bytes a node and layer with its raw row "
        f"({ratio:.0f} times less than a snapshot)",
    ]
    if spec.contract != "fp32":
        lines.append(f"contract  {spec.contract}: outside the fp32 error bounds, by request")
    if spec.readout != "split":
        lines.append(
            f"readout   {spec.readout}: outputs outside the fp32 error bounds, by request"
        )
    return "\n".join(lines)


def _say_solve(plan: TreePlan) -> list[str]:
    """What is solved, and how."""
    if not plan.spec.mixer.delta:
        return [f"solver    none: {plan.spec.mixer.name} has no delta term, so G = 0 and U = R"]
    dropped = plan.depth - plan.steps
    kept = f"{plan.steps} products with G kept"
    if dropped:
        kept += f", {dropped} dropped: no path has more than {plan.steps} edges, so "
        kept += f"G^{plan.steps + 1} = 0"
    blocks = ", ".join(f"{b.rows} rows, {b.steps} inside" for b in plan.blocks[:4])
    more = ", ..." if len(plan.blocks) > 4 else ""
    columns = f"{plan.column_count} columns of G"
    return [
        f"steps     {kept}",
        f"solver    {plan.solver.value}: blocks of {blocks}{more}; {columns}",
    ]


def _build_table(module: EmittedModule, target: str) -> str:
    from bolegen.aot import build_module, triton_version

    rows = [f"{'kernel':10}{'registers':>10}{'spill B':>9}{'shared B':>10}{'products':>10}"]
    for report in build_module(module, find_target(target)):
        fits = "" if report.fits else "  does not fit"
        rows.append(
            f"{report.kernel:10}{report.registers:>10}{report.spill_bytes:>9}"
            f"{report.smem_bytes:>10}{report.dots:>10}{fits}"
        )
    return "\n".join([f"built for {target} by Triton {triton_version()}", *rows])


def _layer(options: argparse.Namespace) -> LayerSpec:
    """The layer of the options: a model's shapes first, then whatever is said explicitly."""
    model = find_model(options.model or _MODEL)
    heads = _pair(options.heads, "--heads", (model.key_heads, model.value_heads))
    dims = _pair(options.dims, "--dims", (model.d_k, model.d_v))
    return LayerSpec(
        mixer=model.mixer if options.mixer is None else find_mixer(options.mixer),
        key_heads=heads[0],
        value_heads=heads[1],
        d_k=dims[0],
        d_v=dims[1],
        conv=model.conv if options.conv is None else options.conv,
        dtype=DType(options.dtype),
        state_dtype=DType(options.state_dtype),
        factors=options.factors,
        contract=options.contract,
        readout=options.readout,
    )


def _pair(text: str | None, name: str, default: tuple[int, int]) -> tuple[int, int]:
    if text is None:
        return default
    first, colon, second = text.partition(":")
    if not (
        colon and first.isascii() and second.isascii() and first.isdigit() and second.isdigit()
    ):
        raise SpecError(f"{name} needs two numbers such as 16:32, not {text[:40]!r}")
    if max(len(first), len(second)) > 6:
        raise SpecError(f"{name} {text[:40]!r} is out of range")
    return int(first), int(second)


def _show(options: argparse.Namespace) -> None:
    tree, numerics = parse_template(options.template), describe_numerics(_plan_tree(options))
    if options.svg is not None:
        try:
            options.svg.write_text(draw_svg(tree), "utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {options.svg}: {error.strerror}") from error
    print(show_tree(tree), f"numerics: {numerics}", sep="\n")


def _plan(options: argparse.Namespace) -> None:
    plan = _plan_tree(options)
    layers = find_model(options.model or _MODEL).layers
    if options.layers is not None:
        layers = options.layers
    memory = plan_memory(plan, layers=layers, batch=options.batch)
    print(show_memory(memory, options.gpu_mem))


def _prove(options: argparse.Namespace) -> None:
    from bolegen.proofs import prove_plan

    spec = LayerSpec(mixer=find_mixer(options.mixer))
    solver = Solver(options.solver) if options.solver else None
    print(prove_plan(plan_template(options.template, spec, depth=options.depth, solver=solver)))


def _check(options: argparse.Namespace) -> None:
    from bolegen.checked import compare_folder, write_folder

    if options.write:
        for path in write_folder(options.dir):
            print(f"wrote {path}")
    else:
        print(f"{compare_folder(options.dir)} modules in {options.dir} are up to date")


def _cache(options: argparse.Namespace) -> None:
    from bolegen.cached import clear_cache, describe_cache

    if options.action == "clear":
        print(clear_cache(options.dir))
    else:
        print(*describe_cache(options.dir), sep="\n")


def _doctor(options: argparse.Namespace) -> None:
    from bolegen.doctor import examine

    for what, finding in examine():
        print(f"{what:10}{finding}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)

"""load gives the module that was asked for, from the nearest place, and runs what it checked."""

import inspect
import json
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bolegen.codegen import compile_template, write_module
from bolegen.codegen.emit import digest_of as emitted_digest
from bolegen.errors import SpecError, TreeError
from bolegen.ir import LayerSpec, Solver
from bolegen_runtime import LoadError, Request, Settings, list_entries, load, loader, record
from repo.sources import ROOT, run_python
from support.rounds import check_verify, make_round

SMALL: dict[str, Any] = {"heads": (1, 2), "dims": (16, 16), "conv": 2}
SPEC = LayerSpec(key_heads=1, value_heads=2, d_k=16, d_v=16, conv=2)
NOT_WHEN_SERVING = ["bolegen", "jinja2", "sympy", "networkx"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


@pytest.fixture
def generated(tmp_path: Path) -> Settings:
    return Settings(cache_dir=None, generated_dir=tmp_path / "generated")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Request) -> tuple[str, str]:
        raise AssertionError(f"compiled {request}")

    monkeypatch.setattr(loader, "_compile", refuse)


def write(settings: Settings, template: str, spec: LayerSpec = SPEC, **options: Any) -> Path:
    assert settings.generated_dir is not None
    return write_module(compile_template(template, spec, **options), settings.generated_dir)


def test_equal_requests_give_the_same_module(settings: Settings) -> None:
    first = load("(2,1)", **SMALL, settings=settings)
    assert load(" ( 2, 1 )", **SMALL, settings=settings) is first
    assert load("(2,1)", depth=2, **SMALL, settings=settings) is first
    assert load("parents:[-1, 0, 0, 1, 2]", **SMALL, settings=settings) is first
    assert load("(2,1)", **SMALL, settings=Settings()) is first
    assert load("(2,1)", depth=3, **SMALL, settings=settings) is not first


def test_the_module_is_what_the_compiler_emits(settings: Settings) -> None:
    module = load("(2,1)", **SMALL, settings=settings)
    emitted = compile_template("(2,1)", SPEC)
    assert inspect.getsource(module) == emitted.text
    assert module.MODULE.digest == emitted.digest
    (entry,) = list_entries(settings.cache_dir or Path())
    assert entry.path.read_text() == emitted.text
    assert entry.request["template"] == "(2,1)"


def test_every_field_of_a_request_changes_the_key_and_the_module(settings: Settings) -> None:
    base = Request("(2,1)", **SMALL)
    changes: dict[str, Any] = {
        "template": "(2,2)",
        "depth": 5,
        "heads": (2, 2),
        "dims": (16, 32),
        "conv": 3,
        "dtype": "fp16",
        "state_dtype": "bf16",
        "factors": "pku",
        "contract": "tf32",
        "readout": "bf16",
        "solver": "substitution",
        "mixer": "other",
    }
    assert set(changes) == {field.name for field in fields(Request)}
    requests = [base, *(replace(base, **{name: new}) for name, new in changes.items())]
    assert len({request.key for request in requests}) == len(requests)
    known = [vars(request) for request in requests if request.mixer == "gdn"]
    texts = {load(settings=settings, **values).MODULE.digest for values in known}
    assert len(texts) == len(known)


@pytest.mark.parametrize("text", ["(2,1)", "any:16", "chain:3"])
def test_the_digest_is_the_compilers(text: str) -> None:
    emitted = compile_template(text, SPEC)
    assert record.digest_of(emitted.text) == emitted_digest(emitted.text) == emitted.digest
    assert record.digest_of(emitted.text + "#\n") != emitted.digest
    found = record.read_record(emitted.text)
    assert found is not None
    assert found["digest"] == emitted.digest
    assert found["parents"] == emitted.plan.tree.parents
    assert found["dtype"] == "bfloat16"


def test_without_a_disk_a_module_works_as_well() -> None:
    module = load("(2,2)", dtype="fp32", **SMALL, settings=Settings())
    assert not Path(str(module.__file__)).exists()
    r = make_round(module)
    factors = module.allocate(2, 1, "cpu")
    check_verify(module, r, r.verify(module, factors), factors).assert_within()


def test_a_bf16_module_computes_right_on_the_cpu(settings: Settings) -> None:
    module = load("(2,1)", **SMALL, settings=settings)
    r = make_round(module)
    factors = module.allocate(2, 1, torch.device("cpu"))
    check_verify(module, r, r.verify(module, factors), factors).assert_within()


def test_a_deleted_file_does_not_matter_once_loaded(settings: Settings) -> None:
    module = load("(3,1)", **SMALL, settings=settings)
    Path(str(module.__file__)).unlink()
    assert "tl.dot" in inspect.getsource(module.solve_gdn_3x1_d2_h1x2_k16_v16_w2.fn)


FRESH = """
import json, sys, torch, triton
with_torch = set(sys.modules)
from pathlib import Path
import bolegen_runtime
settings = bolegen_runtime.Settings(*(Path(p) if p else None for p in sys.argv[1:]))
m = bolegen_runtime.load("(2,1)", heads=(1, 2), dims=(16, 16), conv=2, settings=settings)
loaded = {name.partition(".")[0] for name in set(sys.modules) - with_torch}
print(json.dumps({"file": m.__file__, "digest": m.MODULE.digest, "loaded": sorted(loaded)}))
"""


def fresh(cache_dir: Path | None, generated_dir: Path | None) -> dict[str, Any]:
    """What a new process loads; its working folder and its path hold the compiler."""
    arguments = ["" if path is None else str(path) for path in (cache_dir, generated_dir)]
    answer: dict[str, Any] = json.loads(run_python("-c", FRESH, *arguments))
    return answer


def test_a_cached_module_loads_without_the_compiler(settings: Settings) -> None:
    first = fresh(settings.cache_dir, None)
    again = fresh(settings.cache_dir, None)
    assert "bolegen" in first["loaded"]
    assert not set(NOT_WHEN_SERVING) & set(again["loaded"])
    assert (first["file"], first["digest"]) == (again["file"], again["digest"])


def test_a_generated_module_loads_without_the_compiler(generated: Settings) -> None:
    path = write(generated, "(2,1)")
    found = fresh(None, generated.generated_dir)
    assert found["file"] == str(path)
    assert not set(NOT_WHEN_SERVING) & set(found["loaded"])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("template", "depth", "asked", "asked_depth"),
    [
        ("(2,1)", None, "(2,1)", None),
        ("(2,1)", None, "(2,1)", 2),
        ("(2,1)", 4, "parents:[-1,0,0,1,2]", 4),
        ("chain:3", None, "chain:3", None),
        ("any:16", 6, "any:16", 6),
        ("any:16", 99, "any:16", None),
    ],
)
def test_a_generated_module_answers(
    generated: Settings, template: str, depth: int | None, asked: str, asked_depth: int | None
) -> None:
    path = write(generated, template, depth=depth)
    write(generated, "(5,1)")
    found = load(asked, depth=asked_depth, **SMALL, settings=generated)
    assert inspect.getsource(found) == path.read_text()


@pytest.mark.parametrize(
    "other",
    [
        {"template": "(2,2)"},
        {"depth": 3},
        {"spec": replace(SPEC, contract="tf32")},
        {"spec": replace(SPEC, readout="bf16")},
        {"spec": replace(SPEC, factors="pku")},
        {"solver": Solver.HORNER},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_generated_module_for_something_else_is_left_alone(
    generated: Settings, other: dict[str, Any]
) -> None:
    write(generated, **({"template": "(2,1)"} | other))
    found = load("(2,1)", **SMALL, settings=generated)
    assert inspect.getsource(found) == compile_template("(2,1)", SPEC).text


@pytest.mark.usefixtures("no_compiler")
def test_a_chosen_solver_finds_its_own_module(generated: Settings) -> None:
    write(generated, "(2,1)")
    write(generated, "(2,1)", solver=Solver.SUBSTITUTION)
    found = load("(2,1)", solver="substitution", **SMALL, settings=generated)
    assert found.MODULE.name.endswith("_substitution")


def test_an_edited_generated_module_is_refused_and_not_run(generated: Settings) -> None:
    path = write(generated, "(2,1)")
    path.write_text(path.read_text() + "raise SystemExit('it ran')\n")
    with pytest.raises(LoadError, match=rf"{path} is not what .*bolegen compile"):
        load("(2,1)", **SMALL, settings=generated)


def test_two_generated_modules_for_one_request_are_refused(generated: Settings) -> None:
    path = write(generated, "(2,1)")
    text = path.read_text() + "# of an older compiler\n"
    digest = str(record.digest_of(text))
    old = path.with_name("old.py")
    old.write_text(text.replace(compile_template("(2,1)", SPEC).digest, digest))
    with pytest.raises(LoadError, match="keep one of them"):
        load("(2,1)", **SMALL, settings=generated)


def test_a_generated_folder_must_exist(generated: Settings) -> None:
    with pytest.raises(LoadError, match="BOLEGEN_GENERATED_DIR"):
        load("(2,1)", **SMALL, settings=generated)


def test_a_changed_cache_entry_is_not_run(settings: Settings) -> None:
    load("(4,1)", **SMALL, settings=settings)
    (entry,) = list_entries(settings.cache_dir or Path())
    text = entry.path.read_text()
    entry.path.write_text(text + "raise SystemExit('it ran')\n")
    loader._loaded.clear()
    load("(4,1)", **SMALL, settings=settings)
    assert entry.path.read_text() == text


def test_a_text_that_fails_leaves_no_module_behind() -> None:
    text = compile_template("(2,1)", SPEC).text + "raise RuntimeError('too late')\n"
    old, new = str(text.split("digest    ")[1][:16]), str(record.digest_of(text))
    with pytest.raises(RuntimeError, match="too late"):
        record.import_text(text.replace(old, new), None)
    assert f"bolegen_generated_{new}" not in sys.modules


def test_a_text_of_something_else_is_refused() -> None:
    with pytest.raises(LoadError, match="not what the compiler wrote"):
        record.import_text("ANSWER = 42\n", Path("somewhere.py"))


def test_a_file_template_is_its_contents(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"parents": [-1, 0, 0, 1, 2]}')
    first = load(f"file:{path}", **SMALL, settings=settings)
    assert first is load("(2,1)", **SMALL, settings=settings)
    path.write_text("[-1, 0, 0]")
    assert load(f"file:{path}", **SMALL, settings=settings).MODULE.nodes == 3
    path.write_text("{")
    with pytest.raises(ValueError, match="template: cannot read file:"):
        load(f"file:{path}", **SMALL, settings=settings)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float16"}, ValueError, "dtype: expected one of .*got 'float16'"),
        ({"solver": "magic"}, ValueError, "solver: expected"),
        ({"heads": (1,)}, ValueError, "heads: expected two numbers"),
        ({"depth": 1}, SpecError, "depth 1 is smaller"),
        ({"mixer": "none"}, SpecError, "mixer 'none' not supported"),
        ({"template": "(2 1)"}, TreeError, "whole number"),
        ({"template": "file:/nowhere.json"}, ValueError, "template: cannot read"),
    ],
)
def test_wrong_arguments_are_named(
    settings: Settings, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"template": "(2,1)", "settings": settings, **SMALL, **options}
    with pytest.raises(error, match=message):
        load(**arguments)


def test_a_change_of_a_template_or_a_pass_makes_a_new_cache_folder(tmp_path: Path) -> None:
    copy = tmp_path / "bolegen"
    shutil.copytree(ROOT / "bolegen", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert loader.digest_folder(copy) == loader.compiler_digest()
    seen = {loader.compiler_digest()}
    for name in ("templates/solve.py.jinja", "codegen/passes/choose_solver.py"):
        with open(copy / name, "a") as file:
            file.write("\n")
        seen.add(loader.digest_folder(copy))
    (copy / "templates" / "solve.py.jinja").rename(copy / "templates" / "other.py.jinja")
    seen.add(loader.digest_folder(copy))
    assert len(seen) == 4

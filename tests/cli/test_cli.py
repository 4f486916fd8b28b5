"""The command line: what it prints, what it writes, and how it refuses."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bolegen.cli import main
from bolegen.ir import MIXERS, Mixer
from bolegen_runtime import KernelCache

ROOT = Path(__file__).resolve().parents[2]

MISTAKES = {
    "orphan": (["--template", "parents:[-1,0,7]"], "node 2 is an orphan: its parent 7"),
    "cycle": (["--template", "parents:[-1,1]"], "node 1 is its own parent"),
    "two roots": (["--template", "parents:[-1,-1]"], "a second root"),
    "forward parent": (["--template", "parents:[-1,2,0]"], "parents come before children"),
    "shallow": (["--template", "(3,3,3)", "--depth", "2"], "smaller than the template's 3"),
    "negative depth": (["--template", "any:8", "--depth", "-1"], "depth -1 is negative"),
    "no nodes": (["--template", "()"], "a root alone is chain:0"),
    "no parents": (["--template", "parents:[]"], "at least its root"),
    "zero branching": (["--template", "(3,0)"], "every branching number is at least 1"),
    "a million nodes": (["--template", "any:1000000"], "at most 512 nodes"),
    "a million by branching": (["--template", "(100,100,100)"], "more than 512 nodes"),
    "huge text": (["--template", "(" + "3," * 100_000 + ")"], "characters"),
    "code": (["--template", "__import__('os').system('true')"], "cannot read the template"),
    "code in parents": (["--template", "parents:[-1,__import__('os')]"], "needs a list"),
    "deep nesting": (["--template", "parents:" + "[" * 8000], "needs a list"),
    "booleans": (["--template", "parents:[-1,false]"], "whole numbers"),
    "endless file": (["--template", "file:/dev/zero"], "no such plain file"),
    "bytes in a path": (["--template", "file:a\0b"], "cannot be read"),
    "huge parent": (["--template", "parents:[-1," + "9" * 4000 + "]"], "node 1 is an orphan"),
    "no file": (["--template", "file:/nowhere/tree.json"], "cannot be read"),
    "heads": (["--template", "(2)", "--heads", "3:4"], "multiple of key heads"),
    "heads text": (["--template", "(2)", "--heads", "many"], "--heads needs two numbers"),
    "dims": (["--template", "(2)", "--dims", "100:128"], "dk=100 not supported"),
    "large dims": (["--template", "(2)", "--dims", "264:128"], "dk=264 not supported"),
    "convolution": (["--template", "(2)", "--conv", "5"], "convolution width 5"),
    "mixer": (
        ["--template", "(2)", "--mixer", "mamba9"],
        "'mamba9' not supported; have gdn",
    ),
    "model": (["--template", "(2)", "--model", "gpt-2"], "model 'gpt-2' not known; have"),
    "target": (["--template", "(2)", "--target", "sm_1"], "target 'sm_1' not known; have"),
    "levels at run time": (["--template", "any:8", "--solver", "levels"], "needs a static"),
    "levels of a chain": (["--template", "chain:64", "--solver", "levels"], "substitution"),
    "dtype": (["--template", "(2)", "--dtype", "int8"], "invalid choice"),
    "readout": (["--template", "(2)", "--readout", "bf16", "--dtype", "fp16"], "not to fp16"),
    "solver of nothing": (
        ["--template", "(2)", "--mixer", "mamba2", "--solver", "horner"],
        "solver horner: mixer mamba2 has no delta term, so U = R",
    ),
    "solver of nothing at run time": (
        ["--template", "any:8", "--mixer", "lightning", "--solver", "substitution"],
        "nothing is solved; leave --solver out",
    ),
    "no template": ([], "--template"),
    "no number": (["--template", "(2)", "--depth", "deep"], "invalid int value"),
}


def compile_into(folder: Path, *arguments: str) -> int:
    """``bolegen compile`` with its output in ``folder``; the exit code."""
    try:
        return main(["compile", *arguments, "--out", str(folder)])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else -1


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named_in_one_line_and_nothing_is_written(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = MISTAKES[what]
    assert compile_into(tmp_path / "out", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("bolegen: ")
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 500
    assert said in printed.err
    assert not (tmp_path / "out").exists()


def test_compile_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_into(tmp_path / "new", "--template", "(3,3,3)", "--depth", "8") == 0
    printed = capsys.readouterr().out
    for said in (
        "nodes     40, depth 8 supported",
        "3 products with G kept, 5 dropped: no path has more than 3 edges, so G^4 = 0",
        "16,640 bytes a node",
        "gdn_3x3x3_d8.py",
    ):
        assert said in printed
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["gdn_3x3x3_d8.py"]


def test_compile_again_replaces_a_half_written_file(tmp_path: Path) -> None:
    broken = tmp_path / "gdn_2_d1.py"
    broken.write_text('"""cut sho', "utf-8")
    assert compile_into(tmp_path, "--template", "(2)") == 0
    first = broken.read_text("utf-8")
    assert compile_into(tmp_path, "--template", "(2)") == 0
    assert broken.read_text("utf-8") == first
    assert [path.name for path in tmp_path.iterdir()] == ["gdn_2_d1.py"]


def test_a_folder_that_cannot_be_written_fails_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    assert compile_into(tmp_path / "file", "--template", "(2)") == 1
    assert "cannot write" in capsys.readouterr().err
    assert (tmp_path / "file").read_text("utf-8") == "in the way"


def test_a_model_gives_the_shapes_and_options_override_them(tmp_path: Path) -> None:
    options = ("--template", "(2)", "--model", "olmo-hybrid-7b")
    assert compile_into(tmp_path, *options) == 0
    assert compile_into(tmp_path, *options, "--dims", "64:64") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"gdn_neg_2_d1_h30x30_k96_v192.py", "gdn_neg_2_d1_h30x30_k64_v64.py"}


def test_show_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "tree.svg"
    assert main(["show", "--template", "(3,3,3)", "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "40 nodes" in printed
    assert "numerics: contract fp32; state in two bf16 terms" in printed
    assert main(["show", "--template", "any:8", "--readout", "bf16"]) == 0
    assert "numerics: contract fp32, readout bf16; " in capsys.readouterr().out
    assert picture.read_text("utf-8").startswith("<svg")


def test_prove_prints_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--template", "(2,2)", "--depth", "8"]) == 0
    assert "G^3 = 0" in capsys.readouterr().out
    assert main(["prove", "--template", "(3,3,3)", "--depth", "2"]) == 2
    assert "smaller than the template's 3" in capsys.readouterr().err


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())
@pytest.mark.parametrize("template", ["(3,3)", "any:12"])
def test_every_command_takes_every_mixer(
    template: str, mixer: Mixer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--template", template, "--mixer", mixer.name]
    layer = ["--heads", "1:8", "--dims", "24:40", "--factors", "pku"]
    assert compile_into(tmp_path, *options, *layer) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{mixer.name}_")
    said = "G kept" if mixer.delta else f"none: {mixer.name} has no delta term, so G = 0 and U = R"
    assert said in capsys.readouterr().out
    assert main(["show", *options, *layer]) == 0
    assert "numerics: contract fp32; state in two bf16 terms" in capsys.readouterr().out
    assert main(["plan", *options, *layer]) == 0
    assert "factors are " in capsys.readouterr().out
    assert main(["prove", *options]) == 0
    proven = capsys.readouterr().out
    assert "proven" in proven
    assert ("no delta term" in proven) != mixer.delta


def test_check_finds_a_changed_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--write", "--dir", str(tmp_path)]) == 0
    assert main(["check", "--dir", str(tmp_path)]) == 0
    changed = tmp_path / "gdn_3x3x3_d8.py"
    changed.write_text(changed.read_text("utf-8").replace("tf32x3", "tf32"), "utf-8")
    capsys.readouterr()
    assert main(["check", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "gdn_3x3x3_d8.py differs" in said
    assert "bolegen check --write" in said
    main(["check", "--write", "--dir", str(tmp_path)])
    (tmp_path / "stray.py").write_text("", "utf-8")
    assert main(["check", "--dir", str(tmp_path)]) == 1


def test_doctor_names_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for what in ("bolegen", "torch", "triton", "device", "cache", "compile", "run"):
        assert re.search(rf"^{what} +\S", printed, re.MULTILINE)


def test_doctor_says_which_setting_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOLEGEN_CHECKED", "2")
    assert main(["doctor"]) == 0
    assert re.search(r"^cache +.*BOLEGEN_CHECKED", capsys.readouterr().out, re.MULTILINE)


def test_the_cache_is_listed_and_cleared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KernelCache(tmp_path / "cache", "0" * 16)
    store.get("ab" * 32, lambda: ("gdn_2x1", "X = 1\n"), request={"template": "(2,1)"})
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", str(store.root))
    assert main(["cache", "list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{store.folder.name}/gdn_2x1-\w+\.py  6 bytes  \(2,1\)", printed[0])
    assert printed[1:] == [f"1 modules, 6 bytes in {store.root}"]
    assert main(["cache", "clear", "--dir", str(store.root)]) == 0
    assert re.match(r"freed [\d,]+ bytes in ", capsys.readouterr().out)
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"0 modules, 0 bytes in {store.root}\n"
    monkeypatch.setenv("BOLEGEN_CACHE_DIR", "off")
    assert main(["cache", "list"]) == 1
    assert "there is no cache" in capsys.readouterr().err


def cold(tmp_path: Path, *arguments: str) -> tuple[float, str]:
    """Processor seconds of a fresh process, and what it had imported."""
    code = "import sys; from bolegen.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, "compile", *arguments, "--out", str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime, printed


@pytest.mark.parametrize(
    ("template", "limit_s"), [("(3,3,3)", 0.3), ("chain:511", 5.0), ("any:512", 5.0)]
)
def test_compiling_is_quick_and_loads_no_torch(
    template: str, limit_s: float, tmp_path: Path
) -> None:
    cold(tmp_path, "--template", template)  # writes Python's and Jinja's compiled files
    deadline = time.monotonic() + 20
    while True:
        seconds, modules = cold(tmp_path, "--template", template)
        assert not {"torch", "triton", "sympy"} & set(modules.split())
        # other processes on the machine take from this one: the best of several runs counts
        if seconds <= limit_s or time.monotonic() > deadline:
            break
    assert seconds <= limit_s

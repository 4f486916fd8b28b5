"""Trees and cases of the comparison are fixed, and the peers' files are laid out whole."""

import io
import time
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.cases import list_cases, list_mixers, list_scaling, tree_depth, tree_parents
from benchmarks.contest import list_tasks
from benchmarks.peers import fetch


@pytest.mark.parametrize(
    ("name", "nodes", "depth", "internal"),
    [
        ("333", 40, 3, 13),
        ("chain8", 8, 7, 7),
        ("eagle64", 64, 8, 35),
        ("eagle128", 128, 8, 51),
        ("random64d32", 64, 32, 43),
    ],
)
def test_a_tree_is_what_its_name_says(name: str, nodes: int, depth: int, internal: int) -> None:
    parents = tree_parents(name)
    assert len(parents) == nodes
    assert all(parent < node for node, parent in enumerate(parents))
    assert tree_depth(parents) == depth
    assert len(set(parents) - {-1}) == internal


def test_every_case_is_listed_once_and_built_ahead() -> None:
    cases = [*list_cases(), *list_mixers(), *list_scaling()]
    assert len({case.key for case in cases}) == len(cases)
    built = {case for task, mine in list_tasks(cases) if mine for case in task}
    assert built == set(cases)


def test_a_wheel_is_laid_out_as_packages(tmp_path: Path) -> None:
    wheel = tmp_path / "peer.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in fetch._FILES:
            archive.writestr(name, "kernel = 1\n")
    fetch.lay_out(wheel, tmp_path / "out")
    for name in (*fetch._FILES, *fetch._STAND_INS):
        path = tmp_path / "out" / name
        assert path.is_file()
        assert (path.parent / "__init__.py").is_file()
    assert (tmp_path / "out/sglang/srt/__init__.py").is_file()
    assert not (tmp_path / "out/__init__.py").exists()


@pytest.mark.parametrize("lasts_s", [0.0, 0.5])
def test_a_case_that_hangs_ends_the_run_and_is_named(
    lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(compare, "describe", dict)
    monkeypatch.setattr(compare, "spin_up", lambda: None)
    monkeypatch.setattr(compare, "copy_seconds", lambda _: 1e-12)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(compare._Run, "_case", lambda *_: time.sleep(lasts_s))
    options = Namespace(workers=0, flashinfer=None, limit_s=9.0, case_limit_s=0.2)
    file = io.StringIO()
    case = next(list_mixers())
    compare._Run(file, options).play([case])
    assert ended == [1] * (lasts_s > 0)
    assert (f'"kind": "failed", "case": "{case.key}"' in file.getvalue()) == bool(ended)

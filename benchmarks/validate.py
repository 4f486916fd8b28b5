"""Run the GPU tests and the memory checker, and write docs/validation.md: ``make gpu``."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.pages import table

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["main"]

_TOOLS = ("memcheck", "racecheck")


def main() -> int:
    """0 where every test passed and no checker complained; the page is written either way."""
    device = _device()
    with ThreadPoolExecutor(len(_TOOLS)) as pool:
        # a checker takes minutes of one core; the tests have the others
        checking = pool.map(_run_checker, _TOOLS)
        tests = _run_tests()
        checks = list(checking)
    record = {"device": device, "tests": tests, "checkers": checks}
    (ROOT / "docs/validation.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (ROOT / "docs/validation.md").write_text(_page(device, tests, checks), "utf-8")
    failed = [t["name"] for t in tests if t["outcome"] != "passed"]
    failed += [c["tool"] for c in checks if c["outcome"] == "failed"]
    print(f"{len(tests)} tests, {len(failed)} failures: {', '.join(failed) or 'none'}")
    return 1 if failed or not tests else 0


def _device() -> dict[str, str]:
    import torch
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("bolegen: no CUDA device here; the GPU tests need one")
    return {
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "Triton": triton.__version__,
        "Python": sys.version.split()[0],
    }


def _run_tests() -> list[dict[str, str]]:
    """Name, outcome, seconds and the largest error over its limit that each test printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "-q"]
        command += ["-o", "junit_logging=system-out", "-o", "junit_family=xunit1"]
        if importlib.util.find_spec("xdist"):
            # most of the time goes to compiling, on the processor
            command += ["-n", "14"]
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False)
        cases = list(ET.parse(report).getroot().iter("testcase"))
    return [_case(case) for case in cases]


def _case(case: ET.Element) -> dict[str, str]:
    bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
    printed = case.findtext("system-out") or ""
    said = [line.strip() for line in printed.splitlines() if line.strip().startswith("worst ")]
    return {
        "name": f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}",
        "outcome": bad[0] if bad else "passed",
        "seconds": f"{float(case.get('time', 0)):.1f}",
        "said": "; ".join(line.removeprefix("worst ") for line in said),
    }


def _run_checker(tool: str) -> dict[str, str]:
    """compute-sanitizer over memcheck.py; `not run` where it is not installed."""
    if shutil.which("compute-sanitizer") is None:
        return {"tool": tool, "outcome": "not run", "said": "compute-sanitizer not found"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, str(ROOT / "benchmarks/memcheck.py")],
        env=dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.stdout)
    finished = all(done.stdout.count(word) == 2 for word in ("committed", "replayed"))
    print(done.stdout[-2000:], done.stderr[-2000:])
    return {
        "tool": tool,
        "outcome": "passed" if done.returncode == 0 and finished else "failed",
        "said": f"{'; '.join(said)}; {time.monotonic() - start:.0f} s",
    }


def _page(
    device: dict[str, str], tests: list[dict[str, str]], checks: list[dict[str, str]]
) -> str:
    passed = sum(test["outcome"] == "passed" for test in tests)
    told = [[f"`{t['name']}`", t["outcome"], t["seconds"], t["said"]] for t in tests]
    checked = [[check["tool"], check["outcome"], check["said"]] for check in checks]
    return f"""# What was run on a GPU

Written by `make gpu` on {", ".join(f"{k} {v}" for k, v in device.items())}.
{passed} of {len(tests)} tests passed.
The last column is the largest error over its limit in the contract of
[theory.md](theory.md): at most 1 passes.

{table(["test", "outcome", "seconds", "error / limit"], told)}
compute-sanitizer over `benchmarks/memcheck.py`: a static and a runtime module of odd
shapes, and graphs of 2 and of 24 layers on garbage links; every tensor an allocation of
its own.

{table(["tool", "outcome", "it said"], checked)}"""


if __name__ == "__main__":
    sys.exit(main())

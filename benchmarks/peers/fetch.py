"""Fetch the peers' kernel files: ``python benchmarks/peers/fetch.py`` -> ``.peers/``.

Wheels come from the package index by ``pip download``; the few kernel files named below are
taken out of them, and what those import from the rest of their package is replaced by the short
stand-ins of this file. ``.peers/`` is ignored by git: no peer's code is kept here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["FOLDER", "lay_out", "main"]

FOLDER = ROOT / ".peers"
VERSIONS = {"sglang": "0.5.23"}

_OPS = "sglang/kernels/ops"
_FILES = (
    # node-by-node verify with a snapshot a node: Gated DeltaNet and KDA, then Mamba2
    f"{_OPS}/attention/linear/fused_sigmoid_gating_recurrent.py",
    f"{_OPS}/mamba/triton_ops/mamba_ssm.py",
    # ReplaySSM's verify of chains
    f"{_OPS}/attention/linear/gdn_replayssm_spec_decode.py",
    # tree convolution
    f"{_OPS}/mamba/causal_conv1d_triton.py",
    # commit: states and windows of the accepted nodes
    f"{_OPS}/mamba/mamba_state_scatter_triton.py",
    f"{_OPS}/memory/ptr_table.py",
)

_CAPABILITY = '''"""Stand-in: what the device can do; PEERS_SM names one that is not there."""

import os

import torch


def get_device_sm():
    if "PEERS_SM" in os.environ:
        return int(os.environ["PEERS_SM"])
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def is_arch_support_pdl():
    return get_device_sm() >= 90


def is_cuda():
    return True


def is_hip():
    return False


def is_gfx95_supported():
    return False


def is_sm90_supported():
    return get_device_sm() // 10 == 9
'''
_CORES = '''"""Stand-in: multiprocessors of a device."""

import torch


def get_device_core_count(device_id=0):
    return torch.cuda.get_device_properties(device_id).multi_processor_count
'''
_STAND_INS = {
    "sglang/kernels/jit/utils/__init__.py": _CAPABILITY,
    "sglang/srt/utils/__init__.py": _CAPABILITY,
    "sglang/srt/utils/common.py": _CORES,
    f"{_OPS}/attention/fla/utils.py": '"""Stand-in."""\n\nis_tf32_supported = True\n',
}


def main() -> int:
    """Download the wheels and lay out what is needed of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    with tempfile.TemporaryDirectory() as wheels:
        wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # any build of the wheel will do: only Python files are taken from it
        subprocess.run([*pip, "--only-binary=:all:", "-d", wheels, *wanted], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            lay_out(wheel, folder)
    (folder / "versions.json").write_text(json.dumps(VERSIONS) + "\n", "utf-8")
    files = [path for path in folder.rglob("*.py") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{folder}: {len(files)} files, {size / 1024:.0f} KiB; {VERSIONS}")
    return 0


def lay_out(wheel: Path, folder: Path) -> None:
    """Copy the kernel files out of ``wheel`` into ``folder``, stand-ins beside them."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in _FILES}
    for name, text in _STAND_INS.items():
        contents[name] = text.encode()
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        for package in path.relative_to(folder).parents:
            if package.name:
                (folder / package / "__init__.py").touch()


if __name__ == "__main__":
    sys.exit(main())

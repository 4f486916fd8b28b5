"""Kernels run in Triton's interpreter, mended, unless the GPU tests were asked for by name."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        return
    # before the first import of triton, which decides then
    os.environ["TRITON_INTERPRET"] = "1"
    from bolegen_runtime import interpreter

    interpreter.install()

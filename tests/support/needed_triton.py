"""Tests of kernels need Triton, which torch brings on machines with NVIDIA GPUs and `make test` installs elsewhere."""

import os
from importlib import import_module

import pytest


def require_triton() -> None:
    """Skip what follows if Triton is not installed. In continuous integration, where CI is set, fail instead."""
    if os.environ.get("CI"):
        import_module("triton")
    pytest.importorskip("triton", reason="Triton is not installed; `make test` does it")
    speed_up_interpreter()


def speed_up_interpreter() -> None:
    """Speed up Triton's interpreter, if kernels are interpreted. With a GPU they are not, and Triton is another one."""
    import triton

    if triton.knobs.runtime.interpret:
        from tests.support.quick_interpreter import speed_up

        speed_up()

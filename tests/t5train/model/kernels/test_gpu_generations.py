"""The kernels compile for every kind of GPU that uses them, and fit into its shared memory. No GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needed_triton import require_triton

require_triton()
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program can have, by compute capability (CUDA's programming guide)."""


KERNELS = {
    "queries_forward", "queries_backward", "keys_backward", "bias_tiles", "bias_diagonals", "gelu_forward",
    "gelu_backward", "squares_of_chunks", "squares_of_owners", "update_chunks",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Shared memory in bytes by capability and kernel, as compiled in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    # Triton warns if a launch does not say how products and sums are rounded.
    command = [sys.executable, "-W", "error:TRITON", "-m", "tests.support.kernel_builds", *map(str, SHARED_KIB)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_compile_and_fit_into_shared_memory(built: dict[str, dict[str, int]], capability: int) -> None:
    shared = built[str(capability)]
    assert {name.partition(" ")[0] for name in shared} == KERNELS
    assert max(shared.values()) <= SHARED_KIB[capability] << 10, shared

"""A disk for one test, in a mount namespace: it can be small or read-only."""

import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--map-root-user", "--mount")
_MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


def require_namespaces() -> None:
    """Skip the test if this machine does not allow mount namespaces."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed on this machine")  # else the test would fill the machine's disk


def run_with_disk(folder: Path, size: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program with an empty disk of ``size`` mounted on ``folder``. The program may remount it."""
    require_namespaces()
    command = [*NAMESPACE, "sh", "-c", _MOUNT, "sh", size, str(folder), sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

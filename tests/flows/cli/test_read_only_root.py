"""If the root cannot be written, a command says so in one line, before any work, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.node.ports import free_port

PROGRAM = "from flows.cli.__main__ import main; main()"
# Permissions do not restrict root unless it gives up this capability.
BOUND = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.geteuid() == 0 else []

pytestmark = pytest.mark.skipif(
    bool(BOUND) and shutil.which("setpriv") is None, reason="root, and no setpriv to be less than root"
)

DENIED = (
    "Permission denied; give this user permission (check the folders above, too: `ls -ld` shows their modes), or use "
    "another path"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "smoke", "--root", "closed"],
            f" cannot be written: {DENIED} (--root or --out)",
        ),
        (
            ["run", "smoke", "--root", "closed/root"],
            f"/root cannot be written: {DENIED} (--root or --out)",
        ),
        (
            ["corpus", "smoke", "--root", "closed"],
            f" cannot be written: {DENIED} (--root or --out)",
        ),
        (
            ["up", "--root", "closed", "--port", str(free_port())],
            f"/prefect cannot be created: {DENIED}",
        ),
    ],
)
def test_a_read_only_root_is_reported_in_one_line_before_any_work(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    command = [*BOUND, sys.executable, "-c", PROGRAM, *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode in {2, 4, 5}
    assert result.stderr.startswith(f"error: {closed}")
    assert result.stderr.endswith(f"{closed}{message}\n")
    assert result.stderr.count("\n") == 1
    assert list(closed.iterdir()) == []


@pytest.mark.parametrize(
    ("closed", "verb", "remedy"),
    [
        ("prefect", "written", "Permission denied; choose another root (--root)"),
        ("runs", "created", f"{DENIED} (--root)"),
    ],
)
def test_a_read_only_folder_under_the_root_is_named(tmp_path: Path, closed: str, verb: str, remedy: str) -> None:
    (tmp_path / closed).mkdir(mode=0o500)
    command = [*BOUND, sys.executable, "-c", PROGRAM, "run", "smoke", "--root", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode in {2, 4, 5}
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path / closed}")
    assert last.endswith(f" cannot be {verb}: {remedy}")
    assert "Traceback" not in result.stderr

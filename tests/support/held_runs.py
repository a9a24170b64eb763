"""Runs that another process holds or has taken over, and starts that end with an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.head.launch.held_run import hold_run
from infra.head.storage.claim import Claim
from t5train.errors import RunLocked
from t5train.files.ownership import Ownership

HOLDS = """
import sys, time
from pathlib import Path
from infra.head.launch.held_run import hold_run
from infra.node.attempts.run_lock import run_lock

hold = {"hold_run": hold_run, "run_lock": run_lock}[sys.argv[2]]
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def held_by_another(run: Path, how: str = "hold_run") -> subprocess.Popen[bytes]:
    """A process that holds the run. Before there were records of starts, runs were held by their lock alone."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run), how], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def kill_holder(run: Path, how: str = "hold_run") -> int:
    """Hold a run, kill the process that does, and return its pid."""
    with held_by_another(run, how) as process:
        process.kill()
    return process.pid


def end_with(run: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), hold_run(run):
        raise error


def is_lost(owned: Ownership | Claim) -> bool:
    """Whether this process has noticed that another head has taken over its run."""
    try:
        owned.require_kept()
    except RunLocked:
        return True
    return False

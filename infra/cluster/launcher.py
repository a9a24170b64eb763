"""DeepSpeed's launcher on the head of a run over hosts: under a guard, in an environment that it cannot spread."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra import processes
from infra.attempts import attempt
from infra.attempts.attempt import Attempt
from infra.cluster.launch_command import launcher_variables
from infra.cluster.remote import module_path
from infra.environment import search_path
from infra.node_folder import head_folder
from infra.processes import RUN_ID_VARIABLE, ProcessIdentity

_END_SECONDS = 10.0
_RECORD_SECONDS = 2.0
_LOOK_SECONDS = 0.1
# What ssh, and srun within an allocation, need. What DeepSpeed would put into a shell line of every host is not here.
_ALLOWED = re.compile("LANG|LD_LIBRARY_PATH|LC_.*|HOME|LOGNAME|PATH|SLURM_.*|SSH_AUTH_SOCK|TMPDIR|TZ|USER")
_log = logging.getLogger(__name__)


class ClusterLauncher:
    """The launcher of an attempt, which this process or one before it started on this machine.

    It is never sent another signal than SIGKILL: on any other it would end processes of every host by their name.
    """

    def __init__(self, run_id: str) -> None:
        self.folder = head_folder(run_id)
        self._processes = processes.in_run(attempt.launcher_run_id(run_id))
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, this: Attempt, argv: Sequence[str], accelerator: str | None) -> None:
        """Start it; ``this`` is the attempt as the run's folder has it. The folder and the lease must be there."""
        replace(this, folder=self.folder).write()
        _log.info("attempt %s: %s", this.folder.name, " ".join(argv))
        with open(self.folder / f"{attempt.LAUNCHER}.log", "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "infra.guard", "--launcher", str(self.folder), *argv],
                cwd="/",  # the folder in which hosts start, too
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(self.folder, this.run_id, accelerator),
            )

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, that is its guard."""
        if self._guard is not None:
            return self._guard.poll() is None
        guard = self._guard_identity
        return guard is not None and guard.is_alive()

    def await_end(self) -> None:
        """Let it notice by itself that its ranks have ended, so that its log ends in peace."""
        deadline = time.monotonic() + _END_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """Leave nothing of it on this machine: what it guards first, so that the guard writes down how that ended."""
        guard = self._guard_identity
        processes.end(lambda pid: self._processes(pid) and guard is not None and pid != guard.pid, grace_seconds=0)
        deadline = time.monotonic() + _RECORD_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if left := processes.end(self._processes, grace_seconds=0):
            _log.error("processes %s of %s do not end, not even by SIGKILL", sorted(left), self.folder)
        elif self._guard is not None:
            self._guard.wait()

    @property
    def _guard_identity(self) -> ProcessIdentity | None:
        recorded = self.folder / f"{attempt.LAUNCHER}.pid"
        return ProcessIdentity(**json.loads(recorded.read_text("utf-8"))["guard"]) if recorded.exists() else None


def _environment(folder: Path, run_id: str, accelerator: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if _ALLOWED.fullmatch(name)}
    environment["PATH"] = search_path(environment)
    # These go to every host, by a shell (infra.cluster.launch_command refuses what that would change).
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if path := module_path(None):
        environment["PYTHONPATH"] = path
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    return environment | launcher_variables(folder) | {RUN_ID_VARIABLE: attempt.launcher_run_id(run_id)}

"""Checks whether a waiting run could start on this machine, while the run monitor does other work."""

import subprocess
import sys
import threading

from prefect.client.schemas.objects import FlowRun

from flows.run_parameters import RunParameters
from flows.server.prefect_settings import NEUTRAL_FOLDER

_PROGRAM = ["-P", "-m", "flows.workers.run_check"]
_SECONDS = 120.0


class MachineCheck(threading.Thread):
    """A check of one run, which ends at the latest with this process."""

    def __init__(self, flow_run: FlowRun) -> None:
        super().__init__(daemon=True)
        self.flow_run = flow_run
        self.reason: str | None = None
        """Why the run could not start; empty if it could, and None if the check did not complete."""

    def run(self) -> None:
        """Check the run in a process, because the check imports torch where there may be accelerators."""
        try:
            check = subprocess.run(
                [sys.executable, *_PROGRAM],
                input=RunParameters.of(self.flow_run.parameters).model_dump_json(),
                cwd=NEUTRAL_FOLDER,
                stdout=subprocess.PIPE,
                text=True,
                timeout=_SECONDS,
                check=False,
                start_new_session=True,  # after Ctrl-C it ends with this process, without a traceback
            )
        except subprocess.TimeoutExpired:
            return
        self.reason = None if check.returncode else check.stdout.strip()

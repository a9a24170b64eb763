"""Starts the process with Dask's scheduler (infra.head.tokenising.dask_scheduler), and passes on what it reports."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO

from infra.node.stages.dask_settings import Credentials, unconfigured
from t5train.data.worker_processes import Json
from t5train.errors import InputError, WorkerLost

_PACKAGES = ("distributed", "cryptography")
"""The packages that the head needs; hosts need only the first."""
_MODULE = "infra.head.tokenising.dask_scheduler"


class SchedulerProcess:
    """A scheduler that listens on ``port``, for holders of ``credentials``."""

    def __init__(self, stdin: IO[str], opening: Json) -> None:
        self._stdin = stdin
        self.port: int = opening["port"]
        self.credentials = Credentials(opening["certificate"], opening["key"])

    def begin(self, function: str, jobs: Sequence[Json], hang_seconds: float) -> None:
        """Give it the jobs, once. It gives up workers that make no progress with any job for ``hang_seconds``."""
        with suppress(BrokenPipeError):  # its end is reported as such
            _send(self._stdin, {"function": function, "jobs": jobs, "hang_seconds": hang_seconds})


def require_packages() -> None:
    """Raise InputError if Dask is not installed on this machine."""
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise InputError(
            f"shards.executor is dask, but {' and '.join(missing)} cannot be imported on this machine. Install "
            "t5-pretrain[dask] here and on the hosts, or set shards.executor=local"
        )


@contextmanager
def scheduler_process(lease_seconds: float, on_message: Callable[[Json | None], None]) -> Iterator[SchedulerProcess]:
    """Run a scheduler. ``on_message`` is called in a thread with what it reports, and with None when it has ended.

    Raises WorkerLost if the scheduler does not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**unconfigured(os.environ), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # Ctrl-C in a terminal does not reach it
    )
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
    try:
        with suppress(BrokenPipeError):
            _send(process.stdin, {"lease_seconds": lease_seconds})
        opening = process.stdout.readline()
        if not opening.endswith("\n"):
            raise WorkerLost(
                "Dask's scheduler did not start on this machine. The standard error output of this program shows why"
            )
        listener = threading.Thread(target=_listen, args=(process.stdout, on_message), name="dask", daemon=True)
        listener.start()
        yield SchedulerProcess(process.stdin, json.loads(opening))
    finally:
        process.kill()
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()


def _send(stdin: IO[str], message: Json) -> None:
    stdin.write(json.dumps(message) + "\n")
    stdin.flush()


def _listen(stdout: IO[str], on_message: Callable[[Json | None], None]) -> None:
    with stdout:
        for line in stdout:
            if line.endswith("\n"):  # a process that is killed while it writes leaves half a line
                on_message(json.loads(line))
    on_message(None)

"""Runs pytest in forks of a process that has imported large packages, which takes longer than most tests.

The process imports nothing of this project, so every fork imports the code as it is on disk at that time.
"""

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

_PACKAGES = ("numpy", "torch", "pydantic", "pyarrow", "safetensors", "typer", "rich", "prefect")
# Plugins of pytest that these packages import are not rewritten. Nothing here reads their assertions.
_SWITCHES = ("-Wignore::pytest.PytestAssertRewriteWarning",)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_FAILED = 3  # pytest's exit code for an internal error


class WarmPytest:
    """Pytest in a folder, with an interpreter and an environment of its own."""

    def __init__(self, python: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self._output = folder / "pytest.log"
        self._server = subprocess.Popen(
            [python, __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the command, which ends this process
        )

    def run(self, arguments: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run pytest for at most so long. Returns its exit code, or minus a signal's number, and its output."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps([str(self._output), seconds, *_SWITCHES, *arguments]) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline()), self._output.read_text("utf-8", "replace")

    def end(self) -> None:
        """End the process, with a fork that is running."""
        self._server.kill()
        self._server.wait()


def _serve() -> None:
    for package in _PACKAGES:
        import_module(package)
    gc.collect()
    gc.freeze()  # or tests would get the warnings about what these packages have not closed
    for line in sys.stdin:
        output, seconds, *arguments = json.loads(line)
        if not (pid := os.fork()):
            try:
                os._exit(_pytest(output, arguments))
            except BaseException:
                traceback.print_exc()
                os._exit(_FAILED)
        process = os.pidfd_open(pid)
        if not select.select([process], [], [], seconds)[0]:
            os.killpg(pid, signal.SIGKILL)
        os.close(process)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        with suppress(ProcessLookupError):  # nothing that a test has started is left
            os.killpg(pid, signal.SIGKILL)


def _pytest(output: str, arguments: list[str]) -> int:
    """Run pytest in this fork, as the leader of a group of its own."""
    import pytest

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.setpgid(0, 0)
    for descriptor, path, how in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, how), descriptor)
    os.dup2(1, 2)
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = ["pytest", *arguments]
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()

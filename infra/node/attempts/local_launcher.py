"""Starts the guards of all ranks of one machine, with the variables that DeepSpeed's launcher gives them.

::

    python -m infra.node.attempts.local_launcher --ranks=N --master_port=N ATTEMPT_FOLDER PROGRAM [ARGUMENT...]

DeepSpeed's launcher would first import torch and DeepSpeed, which takes seconds before each start. When a guard fails,
or at SIGTERM or SIGINT, the others are told to end their ranks. Exits with 0 if all guards do and no signal came.
Standard library only.

On accelerators other than GPUs, DeepSpeed's launcher sets that kind's own variable of visible devices. Here, a rank
finds its device by LOCAL_RANK alone.
"""

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

from infra.node.attempts import process_guard

MODULE = "infra.node.attempts.local_launcher"
ADDRESS = "127.0.0.1"
_STOPPED = 1


def launch(num_ranks: int, port: int, guarded: list[str]) -> int:
    """Run a guard for each rank until all have ended; a signal to this process tells all of them to end their ranks.

    Returns the exit code of the first guard that failed, 1 after a signal, or else 0.
    """
    argv = [sys.executable, "-u", "-m", process_guard.MODULE, *guarded]
    guards = list[subprocess.Popen[bytes]]()  # kept, as Python itself would wait for a guard that nothing refers to
    running, code = set[int](), 0

    def end_all() -> None:
        for pid in running:
            with suppress(ProcessLookupError):  # a signal came just after the wait for it
                os.kill(pid, signal.SIGTERM)

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal code
        code = code or _STOPPED
        end_all()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for rank in range(num_ranks):
        if code:
            break
        guards.append(subprocess.Popen(argv, env=os.environ | variables_of(rank, num_ranks, port)))
        running.add(guards[-1].pid)
    if code:
        end_all()  # again: the signal may have come while the last guard was being started
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            end_all()
    return code


def variables_of(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what DeepSpeed's launcher adds to the environment of a rank, on CPUs and CUDA GPUs."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_ranks))),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "LOCAL_SIZE": str(num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def main() -> int:
    """Read the command line, run the guards, and return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("guarded", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    return launch(given.ranks, given.master_port, given.guarded)


if __name__ == "__main__":
    sys.exit(main())

"""Runs one process of an attempt, and sees to its end.

::

    python -m infra.guard ATTEMPT_FOLDER PROGRAM [ARGUMENT...]

The program (a rank where RANK is set, else the launcher) runs in a session of its own, its output in a file.
It ends, with all its process group, when the head dies, when the guard's parent dies, when the guard is told to
end; and when the guard itself is killed, the kernel kills the program. How it ended is written down last.
Standard library only: it must start in an instant, on any node.
"""

import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from infra import attempt, processes, shared_memory
from infra.attempt import Attempt, Cause, ExitRecord
from infra.environment import DEVICES_VARIABLE
from infra.processes import ProcessIdentity
from infra.run_lock import ranks_lock

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RANK_GRACE_SECONDS = 3.0
LAUNCHER_GRACE_SECONDS = 6.0
"""Longer than a rank's, as the launcher's process group holds the ranks' guards, who give that and write records."""


def guard(folder: Path, argv: list[str]) -> ExitRecord:
    """Run ``argv`` until it ends or must end; returns what was written to its exit record."""
    told = _watch_signals()
    parent = os.getppid()
    processes.die_with_parent(signal.SIGTERM)
    this, name = attempt.read(folder), _name()
    started_at = attempt.now()
    # First the lock, then the look at the head: a new head that found the lock free is thereby sure that
    # whoever gets it later finds the old head dead, and starts nothing.
    with ranks_lock(folder.parent.parent) as lock:
        head = this.head.open() if this.head else None
        if head is None or os.getppid() != parent:
            returncode, cause, reason = None, Cause.REFUSED, "the head or the parent died before the start"
        else:
            returncode, cause, reason = _run(this, name, argv, lock, (head, told))
        record = ExitRecord(name, returncode, cause, reason, started_at, attempt.now(), this.host)
        this.write_exit(record)
    return record


def _run(this: Attempt, name: str, argv: list[str], lock: int, alarms: tuple[int, int]) -> tuple[int, Cause, str]:
    """Start the program, wait, end its group; its return code and the reason of its end."""
    with open(this.log(name), "ab", buffering=0) as log:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),  # held by the rank too: a guard that is killed must not free it before its rank is gone
            env=_environment(),
            preexec_fn=partial(_die_with_guard, os.getpid()),  # noqa: PLW1509 - unsafe with threads only, and a guard has none
        )
    this.write_process(name, ProcessIdentity.of(child.pid), ProcessIdentity.of(os.getpid()))
    cause, reason = _wait(os.pidfd_open(child.pid), *alarms)
    grace = LAUNCHER_GRACE_SECONDS if name == attempt.LAUNCHER else _RANK_GRACE_SECONDS
    processes.end(processes.in_group(child.pid), grace)
    shared_memory.remove_of_rank()
    return child.wait(), cause, reason


def _wait(child: int, head: int, told: int) -> tuple[Cause, str]:
    """Sleep until the child ends, the head dies or a signal comes, whichever is first."""
    ready, _, _ = select.select([child, head, told], [], [])
    if child in ready:
        return Cause.EXITED, "exited"
    if told in ready:
        return Cause.TOLD, signal.Signals(os.read(told, 1)[0]).name
    return Cause.HEAD, "the head died"


def _watch_signals() -> int:
    """A descriptor that becomes readable with the first signal, and stays so: none is lost before the child is."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    return readable


def _die_with_guard(guard_pid: int) -> None:
    """In the child, before its program: SIGKILL when the guard dies, also if it is dead already."""
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != guard_pid:
        os._exit(1)


def _name() -> str:
    rank = os.environ.get("RANK")
    return attempt.LAUNCHER if rank is None else attempt.rank_name(int(rank))


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    if "RANK" in environment and DEVICES_VARIABLE in environment:
        environment["CUDA_VISIBLE_DEVICES"] = environment[DEVICES_VARIABLE]
    return environment


def main() -> None:
    """End as the program did, and never well when the guard had to end it."""
    record = guard(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(0 if record.succeeded else 1)


if __name__ == "__main__":
    main()

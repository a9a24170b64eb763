"""Runs one process of an attempt, and sees to its end.

::

    python -m infra.node.attempts.process_guard ATTEMPT_FOLDER PROGRAM [ARGUMENT...]     a rank
    python -m infra.node.attempts.process_guard --launcher ATTEMPT_FOLDER PROGRAM ...    DeepSpeed's launcher

The program runs in a session of its own, its output in a file. It ends, with all its process group, for any of the
reasons in infra.node.attempts.watchdog, and when the head dies; and when the guard itself is killed, the kernel kills
the program. How it ended is written down last. Standard library only: it must start in an instant, on any node.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.node import processes
from infra.node.attempts import attempt, attempt_actions, guard_failure, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.rank_environment import variables_of_rank
from infra.node.attempts.run_lock import ranks_lock
from infra.node.attempts.watchdog import Verdict, Watchdog
from infra.node.processes import ProcessIdentity
from t5train.errors import StorageError

LAUNCHER_OPTION = "--launcher"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 1.0
_SIGNALS_AT_ONCE = 64


@dataclass(frozen=True)
class _Alarms:
    """Descriptors that become readable when the head dies, and when a signal comes; and whose death ends the guard."""

    head: int | None
    told: int
    parent: int | None


def guard(folder: Path, argv: list[str], is_launcher: bool = False) -> ExitRecord:
    """Run ``argv`` until it ends or must end; returns what was written to its exit record."""
    told = _watch_signals()
    parent: int | None = os.getppid()
    this = attempt.read(folder)
    if this.head is None and is_launcher:
        parent = None  # the head, which may come back while the lease lasts
    else:
        processes.die_with_parent(signal.SIGHUP)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # who ends the launcher's group does not end this, and so the rank, without a word
    environment = dict(os.environ) if is_launcher else variables_of_rank(this, os.environ)
    name = attempt.LAUNCHER if is_launcher else attempt.rank_name(int(environment["RANK"]))
    this.reserve_exit(name)
    started_at, oom_kills = attempt.now(), processes.oom_kills()
    # First the lock, then the look at the head: a new head that found the lock free is thereby sure that
    # whoever gets it later finds the old head dead, and starts nothing.
    with _lock(this) as lock:
        head = this.head.open() if this.head else None
        if _is_over(this, head) or parent not in (None, os.getppid()):
            returncode, verdict = None, (Cause.REFUSED, "the head or the parent died before the start")
        else:
            start = partial(_start, this, name, argv, environment, lock)
            returncode, verdict = _run(this, name, start, _Alarms(head, told, parent))
        killed, free_bytes = processes.oom_kills() - oom_kills, shutil.disk_usage(folder).free
        shared = attempt_actions.room() or (None, None)
        ended = (name, returncode, *verdict, started_at, attempt.now(), this.host)
        record = ExitRecord(*ended, killed, free_bytes, *shared)
        this.write_exit(record)
    if not is_launcher:
        attempt_actions.remove_of_rank(environment)
    return record


def _run(
    this: Attempt, name: str, start: Callable[[], subprocess.Popen[bytes]], alarms: _Alarms
) -> tuple[int | None, Verdict]:
    """Start the program, wait, end its group; its return code, None if it outlived SIGKILL, and why it ended."""
    child = start()
    this.write_process(name, ProcessIdentity.of(child.pid), ProcessIdentity.of(os.getpid()))
    verdict = _wait(child.pid, alarms, Watchdog(this, name, child.pid, alarms.parent))
    if verdict[0] == Cause.PHASE:
        os.kill(child.pid, signal.SIGUSR1)  # a rank writes to its log where it hangs
        time.sleep(_STACKS_SECONDS)
    if name == attempt.LAUNCHER and child.poll() == -signal.SIGTERM:
        this.order_stop()  # for all: the head tells the ranks, with which what is left of the launcher ends
        processes.await_end(processes.in_group(child.pid), this.grace_seconds)
    left = processes.end(processes.in_group(child.pid), grace_seconds=0)
    return None if child.pid in left else child.wait(), verdict


def _start(
    this: Attempt, name: str, argv: list[str], environment: Mapping[str, str], lock: int | None
) -> subprocess.Popen[bytes]:
    with open(this.log(name), "ab", buffering=0) as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Held by the rank too: a guard that is killed must not free it before its rank is gone.
            pass_fds=() if lock is None else (lock,),
            env=environment,
            preexec_fn=partial(_die_with_guard, os.getpid()),  # noqa: PLW1509 - unsafe with threads only, and a guard has none
        )


def _wait(child: int, alarms: _Alarms, vigil: Watchdog) -> Verdict:
    """Sleep until the child has ended, or must end."""
    ended = os.pidfd_open(child)
    watched = [ended, alarms.told, *([] if alarms.head is None else [alarms.head])]
    while True:
        ready, _, _ = select.select(watched, [], [], _LOOK_SECONDS)
        if ended in ready:
            return vigil.of_its_end()
        if alarms.head in ready:
            return Cause.HEAD, "the head died"
        reply = os.read(alarms.told, _SIGNALS_AT_ONCE) if alarms.told in ready else b""
        if (verdict := vigil.hear(reply) if reply else vigil.look()) is not None:
            return verdict


def _is_over(this: Attempt, head: int | None) -> bool:
    return head is None if this.head else head_lease.is_ended(this.folder)


@contextmanager
def _lock(this: Attempt) -> Iterator[int | None]:
    """On one machine, the run's; over hosts the head ends what earlier attempts have left there."""
    if this.head is None:
        yield None
        return
    with ranks_lock(this.folder.parent.parent) as lock:
        yield lock


def _watch_signals() -> int:
    """A descriptor that becomes readable with the first signal: none is lost before the child is."""
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


def main() -> None:
    """End as the program did, and never well when the guard had to end it."""
    arguments = sys.argv[1:]
    is_launcher = arguments[0] == LAUNCHER_OPTION
    folder, *argv = arguments[is_launcher:]
    try:
        record = guard(Path(folder), argv, is_launcher)
    except (
        OSError,
        StorageError,
    ) as error:  # where its folder is, nothing can be written down: the launcher's log is elsewhere
        name = attempt.LAUNCHER if is_launcher else attempt.rank_name(int(os.environ["RANK"]))
        sys.stderr.write(guard_failure.line(name, error))
        sys.exit(1)
    sys.exit(0 if record.succeeded else 1)


if __name__ == "__main__":
    main()

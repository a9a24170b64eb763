"""The guard: runs one process of an attempt, and makes sure that it ends.

::

    python -m infra.node.attempts.process_guard ATTEMPT_FOLDER PROGRAM [ARGUMENT...]     a rank
    python -m infra.node.attempts.process_guard --launcher ATTEMPT_FOLDER PROGRAM ...    the launcher

The program runs in its own session and writes its output to a file. The guard ends it, with its whole session,
when the watchdog finds a reason, such as the death of the head (infra.node.attempts.watchdog). If the guard itself is
killed, the kernel kills the program. The exit record is written last. Standard library only: a guard must start quickly
on any node.
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
from infra.node.attempts import attempt, guard_failure, head_lease, shared_memory
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.rank_environment import variables_of_rank
from infra.node.attempts.run_lock import ranks_lock
from infra.node.attempts.watchdog import Verdict, Watchdog
from infra.node.processes import ProcessIdentity
from t5train.errors import StorageError

MODULE = "infra.node.attempts.process_guard"
LAUNCHER_OPTION = "--launcher"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 1.0
_SIGNALS_AT_ONCE = 64


@dataclass(frozen=True)
class _Alarms:
    """What ends the wait for the program, besides its own end and the watchdog.

    ``head`` and ``signals`` are descriptors that become readable when the head dies and when a signal arrives.
    ``parent`` is the pid of the process whose death ends the guard.
    """

    head: int | None
    signals: int
    parent: int | None


def guard(folder: Path, argv: list[str], is_launcher: bool = False) -> ExitRecord:
    """Run ``argv`` until it ends or must be ended; returns the exit record, which is also written to the folder."""
    signals = _watch_signals()
    parent: int | None = os.getppid()
    this = attempt.read(folder)
    if this.head is None and is_launcher:
        parent = None  # its parent is the head, which may be restarted while the lease is valid
    else:
        processes.die_with_parent(signal.SIGHUP)
    if os.getpgrp() != os.getpid():
        # Else a signal to the launcher's group, or the end of its session, would end this guard before it records
        # anything.
        os.setsid()
    environment = dict(os.environ) if is_launcher else variables_of_rank(this, os.environ)
    name = attempt.LAUNCHER if is_launcher else attempt.rank_name(int(environment["RANK"]))
    this.reserve_exit(name)
    started_at, oom_kills = attempt.now(), processes.oom_kills()
    # Take the lock first, then check the head: once a new head has found the lock free, any guard that takes it
    # later finds the old head dead and starts nothing.
    with _lock(this) as lock:
        head = this.head.open() if this.head else None
        if _is_over(this, head) or parent not in (None, os.getppid()):
            returncode, verdict = None, (Cause.REFUSED, "the head or the parent process died before the start")
        else:
            start = partial(_start, this, name, argv, environment, lock)
            returncode, verdict = _run(this, name, start, _Alarms(head, signals, parent))
        killed, free_bytes = processes.oom_kills() - oom_kills, shutil.disk_usage(folder).free
        shared = shared_memory.free_space() or (None, None)
        ended = (name, returncode, *verdict, started_at, attempt.now(), this.host)
        record = ExitRecord(*ended, killed, free_bytes, *shared)
        this.write_exit(record)
    if not is_launcher:
        shared_memory.remove_of_rank(environment)
    return record


def stopping_attempts() -> set[Path]:
    """Return the folders of attempts that were ordered to stop and still have guards on this machine."""
    found = {_folder_among(processes.arguments(pid)) for pid in processes.find(processes.given(MODULE))}
    return {folder for folder in found if folder is not None and (folder / attempt.STOP).exists()}


def _folder_among(arguments: list[str]) -> Path | None:
    """Return the folder of the attempt in the command line of a guard, or of a launcher of guards."""
    after = arguments[arguments.index(MODULE) + 1 :] if MODULE in arguments else []
    return next((Path(each) for each in after if each != LAUNCHER_OPTION), None)


def _run(
    this: Attempt, name: str, start: Callable[[], subprocess.Popen[bytes]], alarms: _Alarms
) -> tuple[int | None, Verdict]:
    """Start the program, wait, and end its session.

    Returns its return code (None if it survived SIGKILL), and the cause and reason of its end.
    """
    child = start()
    this.write_process(name, ProcessIdentity.of(child.pid), ProcessIdentity.of(os.getpid()))
    verdict = _wait(child.pid, alarms, Watchdog(this, name, child.pid, alarms.parent))
    if verdict[0] in (Cause.PHASE, Cause.SAVE):
        os.kill(child.pid, signal.SIGUSR1)  # makes a rank log the stacks of its threads
        time.sleep(_STACKS_SECONDS)
    if name == attempt.LAUNCHER and child.poll() == -signal.SIGTERM:
        # A SIGTERM to the launcher itself asks to stop all: the head tells the ranks, and the rest of the launcher ends
        # with them. A launcher that has ranks on this machine passes the signal on instead.
        this.order_stop()
        processes.await_end(processes.in_session(child.pid), this.grace_seconds)
    left = processes.end(processes.in_session(child.pid), grace_seconds=0)
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
            # The rank holds the lock too: a guard that is killed must not release it before its rank has ended.
            pass_fds=() if lock is None else (lock,),
            env=environment,
            preexec_fn=partial(_die_with_guard, os.getpid()),  # noqa: PLW1509 - unsafe with threads only, and a guard has none
        )


def _wait(child: int, alarms: _Alarms, watchdog: Watchdog) -> Verdict:
    """Wait until the child has ended or must be ended."""
    ended = os.pidfd_open(child)
    watched = [ended, alarms.signals, *([] if alarms.head is None else [alarms.head])]
    while True:
        ready, _, _ = select.select(watched, [], [], _LOOK_SECONDS)
        if ended in ready:
            end = os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT)
            return watchdog.verdict_after_exit(end.si_status if end and end.si_code != os.CLD_EXITED else 0)
        if alarms.head in ready:
            watched.remove(alarms.head)
            watchdog.notice_death_of_head()
        reply = os.read(alarms.signals, _SIGNALS_AT_ONCE) if alarms.signals in ready else b""
        if (verdict := watchdog.handle_signals(reply) if reply else watchdog.check()) is not None:
            return verdict


def _is_over(this: Attempt, head: int | None) -> bool:
    return head is None if this.head else head_lease.is_ended(this.folder)


@contextmanager
def _lock(this: Attempt) -> Iterator[int | None]:
    """Hold the ranks' lock of a run on one machine.

    With several hosts there is no such lock, because the head ends what earlier attempts have left there.
    """
    if this.head is None:
        yield None
        return
    with ranks_lock(this.folder.parent.parent) as lock:
        yield lock


def _watch_signals() -> int:
    """Return a descriptor that becomes readable at a signal, so that none is lost before the child is started."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    return readable


def _die_with_guard(guard_pid: int) -> None:
    """In the child, before its program: have the kernel kill it when the guard dies; exit if the guard is dead."""
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != guard_pid:
        os._exit(1)


def main() -> None:
    """Run the guard; exit with 0 if the program succeeded, and with 1 otherwise."""
    arguments = sys.argv[1:]
    is_launcher = arguments[0] == LAUNCHER_OPTION
    folder, *argv = arguments[is_launcher:]
    try:
        record = guard(Path(folder), argv, is_launcher)
    except (
        OSError,
        StorageError,
    ) as error:  # the folder of the attempt cannot be written, but the launcher's log is elsewhere
        name = attempt.LAUNCHER if is_launcher else attempt.rank_name(int(os.environ["RANK"]))
        sys.stderr.write(guard_failure.line(name, error))
        sys.exit(1)
    sys.exit(0 if record.succeeded else 1)


if __name__ == "__main__":
    main()

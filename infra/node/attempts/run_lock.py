"""One head per run: the locks that prevent two starts of a run at the same time.

``{run}/lock`` is held by the head, the process responsible for the run. ``{run}/ranks.lock`` is shared by every guard
and its rank, so that the next head after a killed one can wait until the last of them has ended. Both are flocks: the
kernel releases them when the holder dies. If the folder is shared and its file system keeps locks local to each client,
the lease (infra.node.attempts.run_lease) excludes heads on other machines.
"""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.node.attempts import run_lease
from infra.node.attempts.attempt import is_saving, living_processes
from infra.node.attempts.run_lease import RunLease
from t5train.errors import RunLocked, StorageError
from t5train.files.locks import flock, is_locked, try_lock
from t5train.files.os_errors import reason

_LOCK, _RANKS_LOCK = "lock", "ranks.lock"
_MOMENT_SECONDS = 0.5  # a process that checks who holds the lock takes it, shared, for an instant
_log = logging.getLogger(__name__)


@contextmanager
def run_lock(run_folder: Path, wait_seconds: float = 30.0) -> Iterator[RunLease]:
    """Hold a run for the caller, creating its folder if necessary. Yields the lease, which shows if it is still held.

    Waits for ranks that a killed head left behind. Raises RunLocked if the run is held already, by this process or
    another, on this machine or another, or if such ranks are still running after ``wait_seconds``, unless that is 0 or
    they are saving a checkpoint as ordered. Raises StorageError if the folder cannot be written or locked, or if other
    users can write to it.
    """
    _make(run_folder)
    with _opened(run_folder / _LOCK) as descriptor:
        if not try_lock(descriptor, _MOMENT_SECONDS):
            raise run_lease.in_use(run_folder, _signature(run_folder))
        lease = RunLease(run_folder, descriptor)
        try:
            _wait_for_ranks(run_folder, wait_seconds)
            yield lease
        finally:
            lease.release()


def require_unused(run_folder: Path) -> None:
    """Raise RunLocked if a process uses a run now. Takes no lock, and creates nothing."""
    if (found := holder(run_folder)) is not None:
        raise run_lease.in_use(run_folder, found)


def holder(run_folder: Path) -> str | None:
    """A description of the process that uses a run, on this machine or another; None if there is none."""
    if (found := holder_here(run_folder)) is not None:
        return found
    elsewhere = run_lease.holder_elsewhere(run_folder)
    return None if elsewhere is None else str(elsewhere)


def holder_here(run_folder: Path) -> str | None:
    """The same for processes on this machine, and on others whose locks are visible here."""
    return _signature(run_folder) if is_locked(run_folder / _LOCK) else None


@contextmanager
def ranks_lock(run_folder: Path) -> Iterator[int]:
    """Hold the lock that guards share; yields its descriptor, which the rank inherits."""
    with _opened(run_folder / _RANKS_LOCK) as descriptor:
        flock(descriptor, fcntl.LOCK_SH)
        yield descriptor


def _wait_for_ranks(run_folder: Path, wait_seconds: float) -> None:
    """Wait until no rank holds the lock, but do not keep it: old guards that take it later find their head dead."""
    with _opened(run_folder / _RANKS_LOCK) as descriptor:
        if try_lock(descriptor):
            return
        _log.info("waiting up to %.0f s for ranks of an earlier start of %s", wait_seconds, run_folder)
        while not try_lock(descriptor, wait_seconds):
            if wait_seconds == 0 or not is_saving(run_folder):
                raise RunLocked(_survivors(run_folder, wait_seconds))
            _log.info("ranks of an earlier start of %s are still saving a checkpoint: waiting for them", run_folder)


def _make(run_folder: Path) -> None:
    try:
        run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = run_folder.stat()
    except OSError as error:
        raise StorageError(f"{run_folder} cannot be created: {reason(error, run_folder)} (--root)") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:  # DeepSpeed unpickles files in this folder
        raise StorageError(
            f"{run_folder} belongs to user {found.st_uid} and has mode {stat.filemode(found.st_mode)}, but only user "
            f"{os.getuid()} may have write access: anyone with write access can make the ranks run code. If the folder "
            "is yours, remove the write access of others (chmod go-w); otherwise choose another root (--root)"
        )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {reason(error, path)}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _signature(run_folder: Path) -> str:
    return str(run_lease.read(run_folder) or "a process that has just started")


def _survivors(run_folder: Path, wait_seconds: float) -> str:
    pids = " ".join(str(pid) for pid in living_processes(run_folder)) or "unknown"
    return (
        f"ranks of an earlier start of run {run_folder} are still running after {wait_seconds:.0f} s "
        f"(processes: {pids}). End these processes (kill -9), then start again"
    )

"""One run, one head: the locks that keep two starts of a run apart.

``{run}/lock`` is held by the head, the process that answers for the run. ``{run}/ranks.lock`` is shared by
every guard and its rank, so a head that follows a killed one can wait until the last of them is gone.
Both are flocks: the kernel lets go when the holder dies, and the text in the file is for people only.
The run folder must be on a disk of this machine.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from infra.attempts.attempt import living_processes, now
from t5train.errors import RunLocked, StorageError
from t5train.file_lock import is_locked, try_lock

_LOCK, _RANKS_LOCK = "lock", "ranks.lock"
_MOMENT_SECONDS = 0.5  # who asks for the holder shares the lock for an instant
_log = logging.getLogger(__name__)
_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


@contextmanager
def run_lock(run_folder: Path, wait_seconds: float = 30.0) -> Iterator[None]:
    """Hold a run for this process; makes the folder if need be. Within the block it may be taken again.

    Ranks that a killed head left behind are waited for. Raises RunLocked if another process holds the
    run, or if such ranks outlive ``wait_seconds``, and StorageError where the folder cannot be written.
    """
    if run_folder in _held.get():
        yield
        return
    _make(run_folder)
    with _opened(run_folder / _LOCK) as descriptor:
        if not try_lock(descriptor, _MOMENT_SECONDS):
            raise RunLocked(
                f"run {run_folder} is being worked on by {_signature(run_folder)}: wait for it to end, or stop it "
                "(kill that process)"
            )
        _sign(descriptor)
        _wait_for_ranks(run_folder, wait_seconds)
        token = _held.set(_held.get() | {run_folder})
        try:
            yield
        finally:
            _held.reset(token)


def holder(run_folder: Path) -> str | None:
    """Who works on a run, in words; None when nobody does."""
    return _signature(run_folder) if is_locked(run_folder / _LOCK) else None


@contextmanager
def ranks_lock(run_folder: Path) -> Iterator[int]:
    """Hold the guards' shared lock; yields its descriptor, which the rank is to inherit."""
    with _opened(run_folder / _RANKS_LOCK) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor


def _wait_for_ranks(run_folder: Path, wait_seconds: float) -> None:
    """Let go at once: guards of the old head that come late find it dead after they have their lock."""
    with _opened(run_folder / _RANKS_LOCK) as descriptor:
        if try_lock(descriptor):
            return
        _log.info("waiting up to %.0f s for ranks of an earlier start of %s", wait_seconds, run_folder)
        if not try_lock(descriptor, wait_seconds):
            raise RunLocked(_survivors(run_folder, wait_seconds))


def _make(run_folder: Path) -> None:
    try:
        run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{run_folder} cannot be made: {error.strerror}; choose another root (--root)") from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}; repair its permissions") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {now()}".encode(), 0)


def _signature(run_folder: Path) -> str:
    return (run_folder / _LOCK).read_text("utf-8") or "a process that started just now"


def _survivors(run_folder: Path, wait_seconds: float) -> str:
    pids = " ".join(str(pid) for pid in living_processes(run_folder)) or "unknown"
    return (
        f"ranks of an earlier start of run {run_folder} are still there after {wait_seconds:.0f} s "
        f"(processes: {pids}): end them (kill -9), then start again"
    )

"""One run, one head: the locks that keep two starts of a run apart.

``{run}/lock`` is held by the head, the process that answers for the run. ``{run}/ranks.lock`` is shared by
every guard and its rank, so a head that follows a killed one can wait until the last of them is gone.
Both are flocks: the kernel lets go when the holder dies, and the text in the file is for people only.
The run folder must be on a disk of this machine.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.attempt import living_processes, now
from t5train.errors import RunLocked

_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


@contextmanager
def run_lock(run_folder: Path, wait_seconds: float = 30.0) -> Iterator[None]:
    """Hold a run for this process; makes the folder if need be.

    Ranks that a killed head left behind are waited for. Raises RunLocked if another process holds the
    run, or if such ranks outlive ``wait_seconds``.
    """
    run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(run_folder / "lock") as descriptor:
        if not _try_lock(descriptor):
            raise RunLocked(_holder(run_folder))
        _sign(descriptor)
        _wait_for_ranks(run_folder, wait_seconds)
        yield


@contextmanager
def ranks_lock(run_folder: Path) -> Iterator[int]:
    """Hold the guards' shared lock; yields its descriptor, which the rank is to inherit."""
    with _opened(run_folder / "ranks.lock") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor


def _wait_for_ranks(run_folder: Path, wait_seconds: float) -> None:
    """Let go at once: guards of the old head that come late find it dead after they have their lock."""
    deadline, waiting = time.monotonic() + wait_seconds, False
    with _opened(run_folder / "ranks.lock") as descriptor:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise RunLocked(_survivors(run_folder, wait_seconds))
            if not waiting:
                _log.info("waiting up to %.0f s for ranks of an earlier start of %s", wait_seconds, run_folder)
                waiting = True
            time.sleep(_LOOK_SECONDS)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode("utf-8"), 0)


def _holder(run_folder: Path) -> str:
    try:
        holder = json.loads((run_folder / "lock").read_text("utf-8"))
    except json.JSONDecodeError:  # taken this instant, not signed yet
        return f"run {run_folder} was started by another process just now: wait for it to end, or stop it"
    return (
        f"run {run_folder} is being worked on by process {holder['pid']} on {holder['host']} since "
        f"{holder['since']}: wait for it to end, or stop it (kill {holder['pid']})"
    )


def _survivors(run_folder: Path, wait_seconds: float) -> str:
    pids = " ".join(str(pid) for pid in living_processes(run_folder)) or "unknown"
    return (
        f"ranks of an earlier start of run {run_folder} are still there after {wait_seconds:.0f} s "
        f"(processes: {pids}): end them (kill -9), then start again"
    )

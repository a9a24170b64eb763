"""Which runs use what was staged on this node, and what is removed when disk space is needed.

The process that stages a folder holds its lock, which the kernel releases when the process ends. From then on, a *pin*
keeps the folder for the run. A pin is a file, and is valid as long as the run has guards on this node, its head renews
its lease (infra.node.attempts.run_ownership), or the pin is less than one hour old. That hour covers the time before
the ranks start and between two attempts. A pin that was set before this machine was restarted is not valid.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.node.attempts import attempt
from infra.node.attempts.run_ownership import is_held
from infra.node.node_folders import SHARDS, STAGED, attempts_folder, run_name_of, within
from infra.node.processes import boot_id
from t5train.errors import StorageError
from t5train.files.atomic import discard, write_text
from t5train.files.locks import try_lock
from t5train.files.os_errors import free_inodes
from t5train.quantities import format_bytes

_LOCKS, _PINS = "locks", "pins"
_PIN_SECONDS = 3600.0
_LOCK_WAIT_SECONDS = 10.0


@contextmanager
def staging_lock(scratch: Path, relative_path: str) -> Iterator[None]:
    """Hold the lock of a staged folder. Raises StorageError, which names the holder, if another process holds it."""
    with _opened_lock(scratch, relative_path) as descriptor:
        if not try_lock(descriptor, _LOCK_WAIT_SECONDS):
            holder = os.pread(descriptor, 200, 0).decode() or "a process that has just started"
            raise StorageError(
                f"{scratch / relative_path} is being staged by {holder}. Wait for that process to end, then start again"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} since {attempt.shown_time(attempt.now())}".encode(), 0)
        yield
        os.utime(descriptor)


def pin(scratch: Path, relative_path: str, run_name: str) -> None:
    """Keep a staged folder for a run of this node."""
    folder = scratch / _PINS / _flat(relative_path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(within(folder, run_name), boot_id())


def unpin(scratch: Path, run_name: str) -> None:
    """Remove all pins of a run."""
    for folder in (scratch / _PINS).glob("*"):
        within(folder, run_name).unlink(missing_ok=True)


def staged_paths(scratch: Path) -> list[str]:
    """Relative paths of the staged folders, even incomplete ones; the least recently used first."""
    paths = [f"{kind}/{path.name}" for kind in (SHARDS, STAGED) for path in (scratch / kind).glob("[!.]*")]
    return sorted(paths, key=lambda path: _used_at(scratch, path))


def users(scratch: Path, relative_path: str) -> list[str]:
    """Runs that use a staged folder, by their names on nodes."""
    return [path.name for path in sorted((scratch / _PINS / _flat(relative_path)).glob("*")) if _counts(path)]


def is_run_active(name: str) -> bool:
    """Whether a run, given by its name on nodes, has running guards on this machine."""
    folders = [path for path in attempts_folder().iterdir() if (path / attempt.ATTEMPT).exists()]
    attempts = (attempt.read(folder) for folder in folders)
    return any(each.run_name == run_name_of(name) and each.guards() for each in attempts)


def remove_unused(scratch: Path, relative_path: str) -> bool:
    """Remove a staged folder unless it is in use or being staged; returns whether it was removed."""
    with _opened_lock(scratch, relative_path) as descriptor:
        if not try_lock(descriptor) or users(scratch, relative_path):
            return False
        discard(within(scratch, relative_path))
    return True


@contextmanager
def _opened_lock(scratch: Path, relative_path: str) -> Iterator[int]:
    path = _lock_path(scratch, relative_path)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _counts(pinned: Path) -> bool:
    if pinned.read_text("utf-8") != boot_id():
        return False
    if time.time() - pinned.stat().st_mtime < _PIN_SECONDS or is_run_active(pinned.name):
        return True
    return is_held(pinned.parents[2], pinned.name)


def _used_at(scratch: Path, relative_path: str) -> float:
    lock = _lock_path(scratch, relative_path)
    return lock.stat().st_mtime if lock.exists() else 0.0


def _lock_path(scratch: Path, relative_path: str) -> Path:
    return scratch / _LOCKS / f"{_flat(relative_path)}.lock"


def _flat(relative_path: str) -> str:
    return relative_path.replace("/", "~")


SPARE_BYTES = 256 << 20
"""Disk space that is left free for logs and for other users of the disk."""


SPARE_INODES = 1000
"""Inodes that are left free for the same reason, and for checkpoints. Every file and folder takes one."""


def require_disk_space(
    scratch: Path, needed_bytes: int, what: str, beside_bytes: int = 0, needed_inodes: int = 0
) -> None:
    """Make sure that ``needed_bytes`` fit on the disk of the scratch folder and leave ``beside_bytes`` free.

    ``beside_bytes`` is what a run will write there. To free disk space, staged folders that no run uses are removed,
    the least recently used first, but never ``what``. Raises StorageError if that is not enough, or if the disk does
    not have ``needed_inodes`` for more files.
    """
    needed, inodes = needed_bytes + beside_bytes + SPARE_BYTES, needed_inodes + SPARE_INODES

    def has_inodes() -> bool:
        free = free_inodes(scratch)
        return free is None or free >= inodes

    for relative_path in staged_paths(scratch):
        if shutil.disk_usage(scratch).free >= needed and has_inodes():
            return
        if relative_path != what:
            remove_unused(scratch, relative_path)
    if (free := shutil.disk_usage(scratch).free) < needed:
        also = f"with {format_bytes(beside_bytes)} for checkpoints " if beside_bytes else ""
        raise StorageError(
            f"{scratch} has {format_bytes(free)} free, but {what} {also}needs {format_bytes(needed)}, and everything "
            "else staged there is in use. Free some disk space, or choose another storage.scratch"
        )
    if not has_inodes():
        raise StorageError(
            f"{scratch} has {free_inodes(scratch):,} free inodes, but {what} and checkpoints need {inodes:,}, one for "
            "each file and folder, and everything else staged there is in use. Remove files from that disk (`df -i` "
            "shows its inodes), or choose another storage.scratch"
        )

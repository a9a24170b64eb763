"""Locks on files, which the kernel releases however their holder ends. Standard library only, as guards import it.

Such a lock excludes processes of this machine. Where a file system keeps locks local to each client (NFS mounted with
``nolock`` or ``local_lock``, Lustre with ``localflock``), it does not exclude those of other machines.
"""

import errno
import fcntl
import time
from pathlib import Path

from t5train.errors import StorageError
from t5train.mounts import file_system

_LOOK_SECONDS = 0.1
_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def flock(descriptor: int, operation: int) -> None:
    """``fcntl.flock``; StorageError where the file system has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise _no_locks(Path(f"/proc/self/fd/{descriptor}").readlink(), error) from error
        raise


def try_lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Try to take the exclusive lock of an open file, for up to ``seconds``; returns whether it was taken."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        else:
            return True


def is_locked(path: Path) -> bool:
    """Whether somebody holds the exclusive lock of a file; to find out, it is shared for an instant."""
    try:
        with open(path, "rb") as file:
            flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _no_locks(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be locked: its file system ({file_system(path)}) does not support flock ({error.strerror}). "
        "Mount it with locking (NFS: without nolock, with a lock service that runs; Lustre: with flock), or use a "
        "folder on another file system"
    )

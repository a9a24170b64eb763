"""Locks on files, of which the kernel lets go however their holder ends. Standard library only, as guards import it.

The file must be on a disk of this machine.
"""

import fcntl
import time
from pathlib import Path

_LOOK_SECONDS = 0.1


def try_lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether the exclusive lock of an open file was had, asked for until ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False

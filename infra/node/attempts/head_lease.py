"""How long ago the head was heard of: what a machine that the head is not on goes by.

The file ``lease`` of an attempt holds the monotonic clock of this machine at the last renewal, and is written in
place: a full disk must not end a run. Standard library only, as the guards import it.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

LEASE = "lease"
_WIDTH = 24
_ROUNDING_SECONDS = 1.0


def begin(folder: Path) -> None:
    """Note that the head was heard of just now, for the first time."""
    _write(folder, os.O_CREAT)


def renew(folder: Path) -> None:
    """Note that the head was heard of just now; a lease that was taken away meanwhile is gone for good."""
    with suppress(FileNotFoundError):
        _write(folder, 0)


def _write(folder: Path, how: int) -> None:
    descriptor = os.open(folder / LEASE, os.O_WRONLY | os.O_NOFOLLOW | how, 0o600)
    try:
        os.pwrite(descriptor, f"{time.monotonic():<{_WIDTH}.3f}".encode(), 0)
    finally:
        os.close(descriptor)


def is_ended(folder: Path) -> bool:
    """Whether the head, which takes the lease away, has ended the attempt."""
    return not (folder / LEASE).exists()


def age_seconds(folder: Path) -> float:
    """Seconds since the last renewal; without end if there was none since the machine started."""
    try:
        renewed = float((folder / LEASE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return float("inf")
    age = time.monotonic() - renewed
    return max(0.0, age) if age > -_ROUNDING_SECONDS else float("inf")  # in the future: of before a restart

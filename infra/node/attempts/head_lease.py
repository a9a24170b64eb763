"""The lease of an attempt on a host: how long ago the head last renewed it.

The file ``lease`` of an attempt contains the monotonic clock of this machine at the last renewal. It is overwritten in
place, so that a full disk does not end a run. Standard library only, as the guards import it.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

LEASE = "lease"
_WIDTH = 24
_ROUNDING_SECONDS = 1.0


def begin(folder: Path) -> None:
    """Create the lease, or renew it if it exists."""
    _write(folder, os.O_CREAT)


def renew(folder: Path) -> None:
    """Renew the lease. A lease that was removed is not created again."""
    with suppress(FileNotFoundError):
        _write(folder, 0)


def _write(folder: Path, how: int) -> None:
    descriptor = os.open(folder / LEASE, os.O_WRONLY | os.O_NOFOLLOW | how, 0o600)
    try:
        os.pwrite(descriptor, f"{time.monotonic():<{_WIDTH}.3f}".encode(), 0)
    finally:
        os.close(descriptor)


def is_ended(folder: Path) -> bool:
    """Whether the attempt was ended, which removes the lease."""
    return not (folder / LEASE).exists()


def age_seconds(folder: Path) -> float:
    """Seconds since the last renewal; infinite if there was none since the machine started."""
    try:
        renewed = float((folder / LEASE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return float("inf")
    age = time.monotonic() - renewed
    return max(0.0, age) if age > -_ROUNDING_SECONDS else float("inf")  # a future time is from before a reboot

"""The shared memory of DeepSpeed's CPU collectives, which outlives the ranks that created it.

If all ranks are on one machine, each creates a file of 66 MiB in /dev/shm, named after its user, the rendezvous and its
rank, and never removes it. That memory is lost until the machine is restarted, and later ranks with the same port would
map it before its owner has cleared it. A file that does not fit is truncated silently, and the rank dies of SIGSEGV or
SIGBUS when it reads beyond the end. Standard library only, as the guards import it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from t5train.errors import StorageError

SEGMENTS = Path("/dev/shm")  # noqa: S108 - shm_open(3), which DeepSpeed calls, has no other folder; we write no file here
RANK_BYTES = 67 << 20
"""The most that a rank uses: the buffers of DeepSpeed's csrc/cpu/comm/shm.cpp, and their header."""
REMEDY = (
    "Enlarge it, for example with `docker run --shm-size=1g` or `mount -o remount,size=1g /dev/shm`, or end other "
    "programs that use it (`ls -lS /dev/shm` lists their files)"
)
_ADDRESS, _PORT, _RANK = "MASTER_ADDR", "MASTER_PORT", "RANK"


class FreeSpace(NamedTuple):
    """Free and total bytes of /dev/shm."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.free >> 20} of {self.total >> 20} MiB free"


def free_space() -> FreeSpace | None:
    """The free and total bytes of /dev/shm on this machine; None if it does not exist."""
    try:
        found = os.statvfs(SEGMENTS)
    except FileNotFoundError:
        return None
    return FreeSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def require_free_space(num_ranks: int) -> None:
    """Raise StorageError if /dev/shm is too small for the collectives of that many CPU ranks, all on this machine."""
    found = free_space()
    if found is not None and (problem := shortage(found, num_ranks * RANK_BYTES)) is not None:
        raise StorageError(f"this machine: {problem}")


def shortage(found: FreeSpace, needed_bytes: int) -> str | None:
    """What /dev/shm lacks, and what to do about it; None if it has enough free space."""
    if found.free >= needed_bytes:
        return None
    return f"{SEGMENTS} has {found}, but the ranks' collectives need {needed_bytes >> 20} MiB. {REMEDY}"


def remove_of_rank(environment: Mapping[str, str] = os.environ) -> None:
    """Remove the segment of the rank that has this environment; ranks that have mapped it keep it."""
    if {_ADDRESS, _PORT, _RANK} <= environment.keys():
        segment = f"{_prefix(environment[_ADDRESS], environment[_PORT])}{int(environment[_RANK])}"
        (SEGMENTS / segment).unlink(missing_ok=True)


def remove_all(address: str, port: int) -> None:
    """Remove the segments of all ranks of this machine with that rendezvous. All of them must have ended."""
    for segment in SEGMENTS.glob(f"{_prefix(address, str(port))}*"):
        segment.unlink(missing_ok=True)


def _prefix(address: str, port: str) -> str:
    return f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_"

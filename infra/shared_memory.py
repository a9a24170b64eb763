"""The shared memory of DeepSpeed's CPU collectives, which outlives the ranks that made it.

Where all ranks are on one machine, each makes a file of 66 MiB in /dev/shm, named after its user, where the ranks meet
and its number, and never removes it: memory that is lost until the machine is restarted, and that later ranks meeting
at the same port would map before its owner has cleared it. A file that does not fit is cut off without a word, and the
rank dies of SIGSEGV or SIGBUS when it reads on. Standard library only, as the guards import it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from t5train.errors import StorageError

SEGMENTS = Path("/dev/shm")  # noqa: S108 - where shm_open keeps them, by the operating system's rules
RANK_BYTES = 67 << 20
"""What a rank takes at the most: the buffers of csrc/cpu/comm/shm.cpp, and its head."""
REMEDY = (
    "enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm), or end what else uses it "
    "(ls -lS /dev/shm)"
)
_ADDRESS, _PORT, _RANK = "MASTER_ADDR", "MASTER_PORT", "RANK"


class Room(NamedTuple):
    """Bytes of /dev/shm."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.free >> 20} of {self.total >> 20} MiB free"


def room() -> Room | None:
    """What there is on this machine; None where there is no /dev/shm."""
    try:
        found = os.statvfs(SEGMENTS)
    except FileNotFoundError:
        return None
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def require_room(num_ranks: int) -> None:
    """StorageError unless the collectives of so many ranks, all on this machine and its CPU, find their memory."""
    found = room()
    if found is not None and (problem := shortage(found, num_ranks * RANK_BYTES)) is not None:
        raise StorageError(f"this machine: {problem}")


def shortage(found: Room, needed_bytes: int) -> str | None:
    """What is wrong with a /dev/shm, and what to do; None if it has room."""
    if found.free >= needed_bytes:
        return None
    return f"{SEGMENTS} has {found}, its ranks' collectives need {needed_bytes >> 20} MiB: {REMEDY}"


def remove_of_rank(environment: Mapping[str, str] = os.environ) -> None:
    """Remove the segment of the rank that has this environment; ranks that have mapped it keep it."""
    if {_ADDRESS, _PORT, _RANK} <= environment.keys():
        segment = f"{_prefix(environment[_ADDRESS], environment[_PORT])}{int(environment[_RANK])}"
        (SEGMENTS / segment).unlink(missing_ok=True)


def remove_all(address: str, port: int) -> None:
    """Remove the segments of every rank of this machine that met there. All of them must have ended."""
    for segment in SEGMENTS.glob(f"{_prefix(address, str(port))}*"):
        segment.unlink(missing_ok=True)


def _prefix(address: str, port: str) -> str:
    return f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_"

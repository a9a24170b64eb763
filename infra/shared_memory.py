"""The shared memory of DeepSpeed's CPU collectives, which outlives the ranks that made it.

Each rank makes a file of 66 MiB in /dev/shm, named after its user, where the ranks meet and its number, and never
removes it: memory that is lost until the machine starts anew, and that later ranks meeting at the same port would map
before its owner has cleared it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SEGMENTS = Path("/dev/shm")  # noqa: S108 - where shm_open keeps them, by the operating system's rules
_ADDRESS, _PORT, _RANK = "MASTER_ADDR", "MASTER_PORT", "RANK"


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

"""Exit records, which say how a guarded process ended and why. Its guard writes the record, which is authoritative.

Standard library only, as the guards import it.
"""

import json
import os
import signal
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from t5train.files.atomic import write_json, write_text

_RESERVED_BYTES = 4096


class Cause(StrEnum):
    """What ended a guarded process."""

    EXITED = "exited"
    """It ended by itself, or by a signal that its guard did not send."""
    REQUESTED = "told"
    """Its guard was told to stop it, or the head ended the attempt."""
    HEAD = "head"
    """The head died, or sent no message for too long."""
    PARENT = "parent"
    """The parent process of its guard died."""
    BEAT = "beat"
    """It gave no sign of life: it was stopped, or it hung."""
    PHASE = "phase"
    """A phase of its work took longer than its deadline."""
    SAVE = "save"
    """Its checkpoint, which it wrote while it trained, took longer than the deadline."""
    REFUSED = "refused"
    """It was never started."""


@dataclass(frozen=True)
class ExitRecord:
    """How a guarded process ended, and why."""

    name: str
    returncode: int | None
    """As in subprocess: the negative signal number if a signal ended it; None if it never started."""
    cause: Cause
    reason: str
    """The cause in words."""
    started_at: str
    ended_at: str
    host: str = ""
    oom_kills: int = 0
    """How many processes on its machine, of any user, the kernel's OOM killer ended while it ran."""
    free_bytes: int | None = None
    """Free bytes on the attempt's disk at the end."""
    shared_memory_free_bytes: int | None = None
    """Free bytes in /dev/shm at the end; None if there is none."""
    shared_memory_bytes: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it completed its work, even if it was told to stop at that moment."""
        return self.returncode == 0 and self.cause in (Cause.EXITED, Cause.REQUESTED)

    @property
    def is_failure(self) -> bool:
        """Whether it ended before its work was done, and not because it was told to stop."""
        return not self.succeeded and self.cause != Cause.REQUESTED

    def __str__(self) -> str:
        if self.cause != Cause.EXITED:
            return f"was ended by its guard ({self.reason})"
        if self.returncode is not None and self.returncode < 0:
            names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
            return f"was killed by {names.get(-self.returncode, f'signal {-self.returncode}')}"
        return f"ended with exit code {self.returncode}"


def reserve(folder: Path, name: str) -> None:
    """Reserve disk space for a record, because the guard must be able to write it even if the disk is full."""
    write_text(_reserved(folder, name), " " * _RESERVED_BYTES)


def write(folder: Path, record: ExitRecord) -> None:
    """Write a record to an attempt's folder, using the disk space that was reserved for it, if any."""
    path, reserved = folder / f"{record.name}.exit.json", _reserved(folder, record.name)
    text = json.dumps(asdict(record), indent=1).encode()
    if not reserved.exists() or len(text) > _RESERVED_BYTES:
        write_json(path, asdict(record))
        return
    with open(reserved, "r+b") as file:
        file.write(text.ljust(_RESERVED_BYTES))
        file.flush()
        os.fsync(file.fileno())
    reserved.replace(path)


def read(folder: Path, name: str) -> ExitRecord | None:
    """Read the record of a process; None if there is none."""
    try:
        return parsed((folder / f"{name}.exit.json").read_text("utf-8"))
    except FileNotFoundError:
        return None


def parsed(text: str) -> ExitRecord:
    """Parse the text of a record."""
    facts = json.loads(text)
    return ExitRecord(**{**facts, "cause": Cause(facts["cause"])})


def _reserved(folder: Path, name: str) -> Path:
    return folder / f".{name}.exit.reserved"

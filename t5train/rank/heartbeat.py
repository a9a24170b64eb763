"""Signs of life of a rank, for the guard that watches it.

A thread writes one a second, so a rank that is stopped falls silent. A rank that hangs does not; so each sign tells of
the phase that its work is in, since when, and how long that may take. It is written in place, in 256 bytes: a full disk
must not end a run. Standard library only, as the guards read them.
"""

import json
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from t5train.files.run_folder import RANK_FILES

if TYPE_CHECKING:  # guards do without pydantic
    from t5train.spec.cluster_spec import DeadlinesSpec

Phase = Literal["start", "compile", "step", "save", "validate"]
BEAT_SECONDS = 1.0
_BYTES = 256
_STEPS_REMEMBERED = 101
_MEDIANS = 10


@dataclass(frozen=True)
class Beat:
    """A sign of life; times are of the machine's monotonic clock, in seconds."""

    beat: float
    phase: Phase
    since: float
    limit: float
    """How long the phase may take."""
    step: int


class Heartbeat:
    """Tells of a rank's life and work; a context manager. Without a path it keeps quiet.

    It begins in the phase ``start``; a first step is of phase ``compile``, as what it needs is compiled in it.
    """

    def __init__(self, path: Path | None, deadlines: "DeadlinesSpec") -> None:
        self._path, self._deadlines = path, deadlines
        self._steps = deque[float](maxlen=_STEPS_REMEMBERED)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._phase: Phase = "start"
        self._since, self._step, self._limit = time.monotonic(), 0, deadlines.start_seconds
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @classmethod
    def of_rank(cls, deadlines: "DeadlinesSpec") -> Self:
        """Where the guard of this process looks for it, if it has one."""
        stem = os.environ.get(RANK_FILES)
        return cls(beat_file(Path(stem)) if stem else None, deadlines)

    def enter(self, phase: Phase, step: int) -> None:
        """The phase that begins now, and the step it is of; a step may take 10 times the median of those before it."""
        now = time.monotonic()
        if self._phase in ("compile", "step") and self._step:
            self._steps.append(now - self._since)
        if phase == "step" and not self._steps:
            phase = "compile"
        with self._lock:
            self._phase, self._since, self._step, self._limit = phase, now, step, self._limit_of(phase)
        self._write()  # at once: what follows may keep the thread from running for long

    def __enter__(self) -> Self:
        if self._path is not None:
            self._write()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _limit_of(self, phase: Phase) -> float:
        allowed: float = getattr(self._deadlines, f"{phase}_seconds")
        return max(allowed, _MEDIANS * median(self._steps)) if phase == "step" else allowed

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._lock:
            beat = Beat(time.monotonic(), self._phase, self._since, self._limit, self._step)
            write(self._path, beat)


def beat_file(rank_files: Path) -> Path:
    """Where the rank whose files begin so shows its signs."""
    return rank_files.with_name(f"{rank_files.name}.beat")


def write(path: Path, beat: Beat) -> None:
    """Overwrite the sign of life in a file; made if it is not there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, json.dumps(asdict(beat)).encode().ljust(_BYTES), 0)
    finally:
        os.close(descriptor)


def read(path: Path) -> Beat | None:
    """The last sign of life; None if there is none, or it is just being written."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return None

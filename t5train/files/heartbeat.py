"""Heartbeats of a rank, for the guard that watches it.

A thread writes a heartbeat every second, so a stopped rank writes none. A rank that hangs still does, so each heartbeat
also records the phase of the rank's work, when the phase began, and how long it may take; and the same of a checkpoint
that is written meanwhile. The file is overwritten in place, in 256 bytes, because a full disk must not end a run.
Standard library only, as guards import it.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Literal, Self

from t5train.files.run_folder import RANK_FILES

Phase = Literal["start", "compile", "step", "save", "validate", "predict"]
PHASE_DESCRIPTIONS: Mapping[Phase, str] = {
    "start": "starting",
    "compile": "preparing the first step",
    "step": "training",
    "save": "saving",
    "validate": "validating",
    "predict": "predicting held-out pairs",
}
BEAT_SECONDS = 1.0
FRESH_SECONDS = 10.0
"""A heartbeat that is older says nothing about the present."""
_BYTES = 256
_NO_SAVE = (None, 0.0, 0.0)
_STEPS_REMEMBERED = 101
_MEDIANS = 10
_LEAST_UNUSUAL_SECONDS = 180.0
_UNUSUAL_SHARES = {"save": 1 / 6}
_UNUSUAL_SHARE = 1 / 2


@dataclass(frozen=True)
class Beat:
    """A heartbeat; times are from the machine's monotonic clock, in seconds."""

    beat: float
    phase: Phase
    since: float
    limit: float
    """How long the phase may take."""
    step: int
    save_step: int | None = None
    """The step whose checkpoint is being written while training goes on; None if there is none."""
    save_since: float = 0.0
    save_limit: float = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a thread of the rank is writing a checkpoint."""
        return self.save_step is not None

    @property
    def is_saving(self) -> bool:
        """Whether the rank is saving a checkpoint, as its only work or while it trains."""
        return self.phase == "save" or self.is_writing


def unusual_seconds(beat: Beat) -> float:
    """Return the duration from which on a phase is worth a look, although it may take longer.

    That is half of what it may take, for a save a sixth (5 min by default), and at least 3 min.
    """
    return max(_LEAST_UNUSUAL_SECONDS, _UNUSUAL_SHARES.get(beat.phase, _UNUSUAL_SHARE) * beat.limit)


class Heartbeat:
    """Writes a rank's heartbeats; a context manager. Without a path it writes nothing.

    It begins in the phase ``start``. The first step is in the phase ``compile``, as that is when compilation happens.
    ``deadlines`` has the seconds that each phase may take, as ``{phase}_seconds``.
    """

    def __init__(self, path: Path | None, deadlines: Mapping[str, float]) -> None:
        self._path, self._deadlines = path, deadlines
        self._steps = deque[float](maxlen=_STEPS_REMEMBERED)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._phase: Phase = "start"
        self._since, self._step, self._limit = time.monotonic(), 0, deadlines["start_seconds"]
        self._save: tuple[int | None, float, float] = _NO_SAVE
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @classmethod
    def of_rank(cls, deadlines: Mapping[str, float]) -> Self:
        """Return the heartbeat of this rank. Without a guard that reads it, it writes nothing."""
        stem = os.environ.get(RANK_FILES)
        return cls(beat_file(Path(stem)) if stem else None, deadlines)

    def enter(self, phase: Phase, step: int) -> None:
        """Enter a phase of a step. A step may take its deadline or 10 times the median step, whichever is longer."""
        now = time.monotonic()
        if self._phase in ("compile", "step") and self._step:
            self._steps.append(now - self._since)
        if phase == "step" and not self._steps:
            phase = "compile"
        with self._lock:
            self._phase, self._since, self._step, self._limit = phase, now, step, self._limit_of(phase)
        self._write()  # at once: the phase may keep the heartbeat thread from running for long

    def note_writing(self, step: int | None) -> None:
        """Report, beside the phase, that a thread begins to write a step's checkpoint or, with None, has ended."""
        with self._lock:
            self._save = _NO_SAVE if step is None else (step, time.monotonic(), self._deadlines["save_seconds"])
        self._write()

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
        allowed = self._deadlines[f"{phase}_seconds"]
        return max(allowed, _MEDIANS * median(self._steps)) if phase == "step" else allowed

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._lock:
            beat = Beat(time.monotonic(), self._phase, self._since, self._limit, self._step, *self._save)
            write(self._path, beat)


def beat_file(rank_files: Path) -> Path:
    """The heartbeat file of the rank whose files have this prefix."""
    return rank_files.with_name(f"{rank_files.name}.beat")


def write(path: Path, beat: Beat) -> None:
    """Overwrite the heartbeat in a file, which is created if it does not exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, json.dumps(asdict(beat)).encode().ljust(_BYTES), 0)
    finally:
        os.close(descriptor)


def read(path: Path) -> Beat | None:
    """The last heartbeat; None if there is none, or if it is being written."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return None

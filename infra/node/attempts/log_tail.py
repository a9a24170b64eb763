"""New lines of the logs of a machine's ranks: all lines of rank 0, and warnings and errors of the others.

The rate of lines is limited. Escape sequences, control characters and text that progress bars overwrote are removed.
"""

import re
import time
from pathlib import Path

from infra.node.attempts.attempt import rank_name

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE_CHARACTERS = 400


def printable(text: str) -> str:
    """Remove terminal control sequences from text that may come from another machine or from a store."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def shown_lines(output: bytes) -> list[str]:
    """The lines of ``output`` that are not empty, each truncated to 400 characters."""
    text = _ESCAPES.sub("", output.decode("utf-8", errors="replace"))
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [printable(line).rstrip()[:_LINE_CHARACTERS] for line in lines if line.strip()]


class RateLimit:
    """Allows ``burst`` items at once, and then ``a_second`` items per second."""

    def __init__(self, a_second: float, burst: float) -> None:
        self._a_second, self._burst = a_second, burst
        self._allowance, self._counted_at = burst, time.monotonic()

    def take(self, wanted: int) -> int:
        """Take up to ``wanted`` items from the allowance; returns how many are allowed now."""
        now = time.monotonic()
        self._allowance = min(self._burst, self._allowance + (now - self._counted_at) * self._a_second)
        self._counted_at = now
        taken = min(wanted, int(self._allowance))
        self._allowance -= taken
        return taken


LINES_A_SECOND = 5.0
BURST_LINES = 40.0
_READ_BYTES = 1 << 20
_WARNS = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL|Traceback|[A-Za-z.]*(Error|Warning|Exception|Interrupt))\b")
Offsets = dict[str, int]
"""Bytes read so far of each rank's log, by the name of the rank."""


def warns(line: str) -> bool:
    """Whether a line is a warning or an error."""
    return _WARNS.search(line) is not None


class LogTail:
    """Reads what was added to a rank's log since the last read, at most 1 MiB at a time."""

    def __init__(self, path: Path, offset: int | None) -> None:
        """Begin at ``offset``, or at the current end of the log if it is None."""
        self.name = path.stem
        self.offset = path.stat().st_size if offset is None else offset
        self._path = path
        self._limit = RateLimit(LINES_A_SECOND, BURST_LINES)

    def read(self) -> tuple[list[str], int]:
        """Return the new lines to report, and how many more the rate limit left out."""
        lines = [line for line in shown_lines(self._new()) if self.name == rank_name(0) or warns(line)]
        allowed = self._limit.take(len(lines))
        return lines[:allowed], len(lines) - allowed

    def _new(self) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(self.offset)
            new = file.read(_READ_BYTES)
        whole = new.rfind(b"\n") + 1 or (len(new) if len(new) == _READ_BYTES else 0)
        self.offset += whole
        return new[:whole]


class LogTails:
    """The logs of all ranks of an attempt on this machine, including ranks that start later."""

    def __init__(self, folder: Path, offsets: Offsets | None) -> None:
        """Continue at ``offsets``. With None, skip existing lines, for a head that begins to watch running ranks."""
        self._folder = folder
        self._tails = {
            path.stem: LogTail(path, offsets.get(path.stem, 0) if offsets is not None else None)
            for path in folder.glob("rank-*.log")
        }

    def read(self) -> tuple[list[tuple[str, str]], int]:
        """Return new lines with the name of their rank, and how many more the rate limit left out."""
        for path in self._folder.glob("rank-*.log"):
            self._tails.setdefault(path.stem, LogTail(path, 0))
        news = [(tail.name, *tail.read()) for tail in self._tails.values()]
        return [(name, line) for name, lines, _ in news for line in lines], sum(left_out for *_, left_out in news)

    @property
    def offsets(self) -> Offsets:
        """The offsets at which another LogTails can continue."""
        return {name: tail.offset for name, tail in self._tails.items()}

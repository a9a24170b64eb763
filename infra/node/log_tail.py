"""New lines of the logs of a machine's ranks, at a bounded rate: all of rank 0, of the others warnings and errors."""

import re
from pathlib import Path

from infra.attempts.attempt import rank_name
from infra.attempts.log_lines import shown_lines
from infra.node.rate_limit import RateLimit

LINES_A_SECOND = 5.0
BURST_LINES = 40.0
_READ_BYTES = 1 << 20
_WARNS = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL|Traceback|[A-Za-z.]*(Error|Warning|Exception|Interrupt))\b")

Offsets = dict[str, int]
"""Bytes that were read, by the name of the rank."""


def warns(line: str) -> bool:
    """Whether a line is a warning or an error."""
    return _WARNS.search(line) is not None


class LogTail:
    """What a rank's log has gained since it was last asked for; reads no more than a mebibyte at a time."""

    def __init__(self, path: Path, offset: int | None) -> None:
        """Begin at ``offset``, at the end of what is there if that is None."""
        self.name = path.stem
        self.offset = path.stat().st_size if offset is None else offset
        self._path = path
        self._limit = RateLimit(LINES_A_SECOND, BURST_LINES)

    def read(self) -> tuple[list[str], int]:
        """New lines that are worth telling, and how many of these were left out as too many."""
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
    """The logs of all ranks of an attempt on this machine, of those that start later too."""

    def __init__(self, folder: Path, offsets: Offsets | None) -> None:
        """Go on at ``offsets``; None is for a head that begins to watch ranks at work, and wants only what is new."""
        self._folder = folder
        self._tails = {
            path.stem: LogTail(path, offsets.get(path.stem, 0) if offsets is not None else None)
            for path in folder.glob("rank-*.log")
        }

    def read(self) -> tuple[list[tuple[str, str]], int]:
        """New lines with their rank's name, and how many were left out."""
        for path in self._folder.glob("rank-*.log"):
            self._tails.setdefault(path.stem, LogTail(path, 0))
        news = [(tail.name, *tail.read()) for tail in self._tails.values()]
        return [(name, line) for name, lines, _ in news for line in lines], sum(left_out for *_, left_out in news)

    @property
    def offsets(self) -> Offsets:
        """Where to go on."""
        return {name: tail.offset for name, tail in self._tails.items()}

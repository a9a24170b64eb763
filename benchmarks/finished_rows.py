"""Finished measurements in a file of JSON lines, each with what it is valid for."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

_WHAT = ("recipe", "settings", "ranks")
_REASONS = {
    "code": "other code",
    "machine": "another machine",
    "device": "another device",
    "versions": "other versions",
    "steps": "another number of steps",
}


class Subject(BaseModel):
    """What is measured, with what, and where. Only measurements of equal subjects are compared with each other."""

    model_config = ConfigDict(frozen=True)
    recipe: str
    settings: tuple[str, ...]
    ranks: int
    steps: int
    device: str
    machine: str
    """An id of the machine, which changes when it restarts."""
    code: str
    """A digest of the code that is measured. A commit of documentation does not change it."""
    versions: tuple[tuple[str, str], ...]


class FinishedRow(BaseModel):
    """A finished measurement."""

    subject: Subject
    commit: str
    finished_at: str
    duration_seconds: float
    """How long it took in all, from the start of its processes to their end."""


Row = TypeVar("Row", bound=FinishedRow)


class FinishedRows(Generic[Row]):
    """The finished measurements of one subject, in a file that may also hold those of others."""

    def __init__(self, path: Path, kind: type[Row], subject: Subject) -> None:
        self._path, self.subject = path, subject
        self.all: list[Row] = list(_read(path, kind))
        """Those of every subject."""
        self.finished: list[Row] = [row for row in self.all if row.subject == subject]

    def add(self, row: Row) -> None:
        """Append a measurement to the file, on disk when this returns."""
        text = self._path.read_bytes() if self._path.exists() else b""
        torn = text and not text.endswith(b"\n")  # the last line, if its writer was killed
        with open(self._path, "ab") as file:
            file.write((b"\n" if torn else b"") + row.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.all.append(row)
        self.finished.append(row)

    def like(self) -> list[Row]:
        """Return all measurements of this recipe and these settings, with whatever code and on whatever machine."""
        return [row for row in self.all if _same(row.subject, self.subject, _WHAT)]

    def ignored(self) -> str:
        """Return a sentence about the measurements that are not used, and why; empty if there are none."""
        others = [row.subject for row in self.like() if row.subject != self.subject]
        reasons = Counter(_reasons(other, self.subject) for other in others)
        if not reasons:
            return ""
        listed = "; ".join(f"{number} of {why}" for why, number in reasons.most_common())
        return f"{self._path}: {len(others)} measurements are not used: {listed}"


def _same(one: Subject, other: Subject, names: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _reasons(found: Subject, wanted: Subject) -> str:
    return ", ".join(reason for name, reason in _REASONS.items() if not _same(found, wanted, (name,)))


def _read(path: Path, kind: type[Row]) -> Iterator[Row]:
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            yield kind.model_validate_json(line)
        except ValidationError:
            print(f"{path}: skipped a line that is not a whole measurement: {line[:60]!r}", flush=True)

"""Runs that have ended, as far as the head's copy of the last checkpoint may stand in for that of the hosts."""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.attempts import attempt
from infra.node_store.left_attempts import KnownAttempts
from infra.node_store.paths import name_on_nodes
from infra.run_lock import holder
from t5train.errors import RecordError, T5TrainError, UnknownVersion, Unreadable
from t5train.presence import visible_in
from t5train.progress import Progress
from t5train.records import Checkpoint
from t5train.run_files import ATTEMPTS, RUNS
from t5train.train.run import unique_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """A run whose end is recorded and that nobody works on."""

    folder: Path
    name: str
    """On nodes."""
    unique_id: str | None
    """None for a run of an earlier version."""
    fault: str = ""
    """Why what hosts have of it must stay: what is wrong with the head's copy."""

    def to_json(self) -> dict[str, Any]:
        """What nodes are told."""
        return {"unique_id": self.unique_id, "fault": self.fault}


def finished_runs(root: Path) -> list[FinishedRun]:
    """The runs under a root that have ended and that nobody works on; their files are looked for, and not read."""
    found = []
    for folder in idle_runs(root):
        try:
            record = Checkpoint.load(folder)
        except RecordError:
            continue
        except (Unreadable, UnknownVersion) as error:
            _log.warning("what hosts have of %s is kept: %s", folder.name, error)
            continue
        name = name_on_nodes(folder.name, record.fingerprint)
        found.append(FinishedRun(folder, name, unique_id(folder), _fault(record)))
    return found


def verified(runs: Iterable[FinishedRun], names: Collection[str], progress: Progress) -> Iterator[FinishedRun]:
    """The same, where every byte of those called ``names`` on nodes was compared with its digest."""
    for run in runs:
        if run.fault or run.name not in names:
            yield run
            continue
        try:
            Checkpoint.load(run.folder).verify(progress)
            yield run
        except T5TrainError as error:
            yield replace(run, fault=str(error))


def idle_runs(root: Path) -> Iterator[Path]:
    """Folders of runs that nobody works on."""
    return (folder for folder in _folders(root) if holder(folder) is None)


def known_attempts(root: Path) -> KnownAttempts:
    """The attempts of all runs under a root."""
    idle = list(idle_runs(root))
    busy = [folder for folder in _folders(root) if folder not in idle]
    return KnownAttempts(_attempts(idle), _attempts(busy))


def _folders(root: Path) -> list[Path]:
    return [folder for folder in visible_in(root / RUNS) if folder.is_dir()]


def _attempts(runs: Iterable[Path]) -> list[str]:
    files = (file for run in runs for file in sorted((run / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}")))
    return [attempt.read(file.parent).run_id for file in files]


def _fault(record: Checkpoint) -> str:
    """What is wrong with the head's copy, as far as sizes tell."""
    for name, digest in record.files.items():
        path = record.path / name
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"{path}: {error.strerror}"
        if size != digest.size:
            return f"{path} has {size} bytes, {digest.size} were recorded"
    return ""

"""The record of a run's last complete checkpoint: it distinguishes a lost tag from one that was never finished."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from t5train.errors import NothingVerifies, RecordError
from t5train.files.atomic import write_json
from t5train.files.presence import ABSENT, reading
from t5train.files.run_folder import LAST_COMPLETE, SET_ASIDE

_MOST_REASONS = 3


@dataclass(frozen=True)
class LastComplete:
    """A checkpoint that was complete at the time ``at``."""

    tag: str
    at: str
    places: Mapping[str, Sequence[str]]
    """The hosts that had each file, if hosts do not share a disk."""


def note(run_folder: Path, tag: str, places: Mapping[str, Sequence[str]] | None = None) -> None:
    """Record that a tag is complete, durably."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run_folder / LAST_COMPLETE, {"tag": tag, "at": at, "places": places or {}})


def last_complete(run_folder: Path) -> LastComplete | None:
    """The last recorded checkpoint; None if none was ever complete. Raises Unreadable and RecordError."""
    path = run_folder / LAST_COMPLETE
    try:
        with reading(path):
            return LastComplete(**json.loads(path.read_bytes()))
    except ABSENT:
        return None
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}). That file records the run's last complete checkpoint. Restore the file, or "
            "move it to another folder: the run then resumes from the newest checkpoint that is still complete, but "
            "begins at step 0 if no checkpoint was finished or all are lost"
        ) from error


def nothing_verifies(run_folder: Path, reasons: list[str]) -> NothingVerifies:
    """The error for a run that had complete checkpoints and has none left."""
    more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
    return NothingVerifies(
        f"run {run_folder.name} has no complete checkpoint left: {'; '.join(reasons[:_MOST_REASONS])}{more}. Bring "
        "back the host, the disk or the files, or begin at step 0 with --begin-again, which deletes nothing: it moves "
        f"the remaining files to {run_folder / SET_ASIDE}"
    )

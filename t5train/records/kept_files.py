"""Find the user's files in a finished folder: those that its manifest does not list, or that were changed.

No stage removes or overwrites them.
"""

import logging
from pathlib import Path

from t5train.errors import DigestMismatch, RecordError
from t5train.files.atomic import rename_aside
from t5train.files.presence import files_below
from t5train.records.digests import verify_file
from t5train.records.stage_records import MANIFEST, Record, parse_manifest

_log = logging.getLogger(__name__)


def changed_files(record: Record) -> list[str]:
    """Names of the files in the record's folder that its manifest does not list, or lists with another digest."""
    return sorted({*unlisted_files(record), *(name for name in record.files if _is_changed(record, name))})


def unlisted_files(record: Record) -> list[str]:
    """Names of the files in the record's folder that its manifest does not list."""
    return sorted(set(files_below(record.path)) - {MANIFEST, *record.files})


def keep_changed_files(folder: Path) -> None:
    """Move changed files that a finished folder's manifest lists aside, before its stage writes them again."""
    try:
        record = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    except (FileNotFoundError, RecordError, DigestMismatch):
        return  # an unfinished folder: its files are the stage's own
    record = record.model_copy(update={"path": folder})
    for name in record.files:
        if _is_changed(record, name):
            _log.warning("%s was changed: it was moved to %s", folder / name, rename_aside(folder / name))


def _is_changed(record: Record, name: str) -> bool:
    """Whether a listed file exists but differs from its recorded digest."""
    path = record.path / name
    if Path(name).is_absolute() or not path.exists():
        return False
    try:
        verify_file(path, record.files[name])
    except DigestMismatch:
        return True
    return False

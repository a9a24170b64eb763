"""Compare a folder with its manifest: find the user's files, and refuse files that are not the recorded ones.

The user's files are those that the manifest does not list, or that were changed. No stage removes or overwrites them.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from t5train.errors import DigestMismatch, RecordError
from t5train.files.atomic import rename_aside
from t5train.files.presence import ABSENT, files_below, reading
from t5train.records.digests import FileDigest, SafetensorsDigest, verify_file
from t5train.records.stage_records import MANIFEST, Record, parse_manifest

_log = logging.getLogger(__name__)


def changed_files(record: Record) -> list[str]:
    """Names of the files in the record's folder that its manifest does not list, or lists with another digest."""
    return sorted({*unlisted_files(record), *(name for name in record.files if _is_changed(record, name))})


def unlisted_files(record: Record) -> list[str]:
    """Names of the files in the record's folder that its manifest does not list."""
    return sorted(set(files_below(record.path)) - {MANIFEST, *record.files})


def recorded_files(folder: Path) -> Mapping[str, FileDigest | SafetensorsDigest] | None:
    """Return the digests in the manifest of a folder; None without a manifest, or with another program's.

    Raises RecordError or DigestMismatch for a manifest that is damaged, because nothing can be compared with it.
    """
    manifest = folder / MANIFEST
    try:
        with reading(manifest):
            content = manifest.read_bytes()
    except ABSENT:
        return None
    if _is_of_another_program(content):
        _log.warning("%s is not of this project, so the files in %s are used without verification", manifest, folder)
        return None
    return parse_manifest(content, str(manifest)).files


def _is_of_another_program(content: bytes) -> bool:
    """Whether a manifest is intact JSON without the fields of all records. One that is cut off may be ours."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return not isinstance(document, dict) or not document.keys() & {"kind", "fingerprint", "seal"}


def require_as_recorded(folder: Path, names: Iterable[str]) -> None:
    """Verify these files of a folder if it has a manifest.

    Raises DigestMismatch, naming the first file that differs or that the manifest does not list, and the errors of
    ``recorded_files``.
    """
    if (recorded := recorded_files(folder)) is None:
        return
    for name in names:
        if (digest := recorded.get(name)) is None:
            raise DigestMismatch(
                f"{folder / name} is not among the files in {folder / MANIFEST}: it was added later. Remove it, or "
                "restore the folder"
            )
        verify_file(folder / name, digest)


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

"""Results that can be made again: a damaged one is moved aside for the new one, and the log says where it is."""

import logging
from pathlib import Path

from t5train.atomic_folder import rename_aside
from t5train.errors import DigestMismatch, RecordError
from t5train.presence import ABSENT, reading
from t5train.records import MANIFEST
from t5train.verify import parse_manifest

_log = logging.getLogger(__name__)


def set_damaged_aside(folder: Path) -> None:
    """Move a folder whose manifest is damaged aside: without it nobody can say which files somebody added or changed.

    A folder with a whole manifest of any kind, or with none, stays: the stage itself knows what to do with its own
    result, and refuses anything else. Raises Unreadable and UnknownVersion: such a manifest may be whole.
    """
    manifest = folder / MANIFEST
    try:
        with reading(manifest):
            content = manifest.read_bytes()
        parse_manifest(content, str(manifest))
    except ABSENT:
        return
    except (RecordError, DigestMismatch) as error:
        _log.warning("%s: the folder was moved to %s, and is made again", error, rename_aside(folder))

"""Results that can be made again from what is kept: a damaged one makes room for the new one, and the log says so."""

import logging
from pathlib import Path

from t5train.atomic_folder import discard
from t5train.errors import DigestMismatch, RecordError
from t5train.presence import ABSENT, reading
from t5train.records import MANIFEST
from t5train.verify import parse_manifest

_log = logging.getLogger(__name__)


def remove_damaged(folder: Path) -> None:
    """Remove a folder whose manifest is damaged; to be asked only of a place that belongs to the stage that fills it.

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
        _log.warning("%s: this stage is made again", error)
        discard(folder)

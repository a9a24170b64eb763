"""Move files out of the way that must be neither used nor lost. Standard library only, as nodes import it.

Such files are a damaged checkpoint that is newer than the one training resumes from, or an unreadable copy of a file
that has a readable one. They are never deleted: neither pruning nor garbage collection touches a folder called
``set-aside``. The log says what was moved there.
"""

import logging
import secrets
from pathlib import Path

from t5train.errors import StorageError
from t5train.files.atomic import sync_folder
from t5train.files.presence import ABSENT

_log = logging.getLogger(__name__)


def set_aside(path: Path, into: Path, why: str) -> Path | None:
    """Rename a file or folder to a unique name in the folder ``into``, durably; None if it no longer exists.

    Raises StorageError if it cannot be renamed, for example to another disk; then it stays where it is.
    """
    within = f"{path.parent.name}-" if path.parent.name.startswith("step-") else ""
    target = into / f"{within}{path.name}.{secrets.token_hex(4)}"
    try:
        path.lstat()  # so that an empty folder is not made if there is nothing to move
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.rename(target)
        sync_folder(into)
        sync_folder(path.parent)
    except ABSENT:
        return None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be moved to {target} ({error.strerror}): move it away yourself, then start again"
        ) from error
    _log.warning("%s was moved to %s: %s", path, target, why)
    return target

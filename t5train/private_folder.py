"""Folders that are surely one's own, where everybody may write. Standard library only, as guards import it."""

import os
import stat
from pathlib import Path

from t5train.errors import StorageError


def private_folder(folder: Path) -> Path:
    """Make a folder for its owner alone, if it is not there.

    Raises StorageError if it is a link, another user's, or open to others.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made: {error.strerror}; make room, repair its permissions, or choose another folder"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StorageError(
            f"{folder} is not a folder of user {os.getuid()} alone (its owner is {found.st_uid}, its mode "
            f"{stat.filemode(found.st_mode)}): move it away"
        )
    return folder

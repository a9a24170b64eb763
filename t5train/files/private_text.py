"""Short secrets in files that only their owner can read. Standard library only."""

import os
import stat
from pathlib import Path

from t5train.errors import StorageError

_MOST_CHARACTERS = 1024


def read_private(path: Path, remedy: str) -> str:
    """Return the text of a file, without the space around it.

    Raises StorageError with the remedy unless it is a file of this user that nobody else can read, and not a link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; fix its permissions, or {remedy}") from error
    with open(descriptor, encoding="ascii", errors="replace") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise StorageError(
                f"{path} is not a private file of user {os.getuid()} (its owner is {found.st_uid}, its mode "
                f"{stat.filemode(found.st_mode)}), so others may know the key: {remedy}"
            )
        return file.read(_MOST_CHARACTERS).strip()

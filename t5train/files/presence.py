"""Check what exists on disk, and what cannot be read now. Standard library only, as nodes import it.

``Path.glob`` and ``os.path.exists`` report some errors as "does not exist", and a bare ``OSError`` from a read does not
even name the file. Code that decides about checkpoints or results uses this module instead. A path is absent only if
the operating system says so (ENOENT). Other errors raise ``Unreadable`` with path, cause and remedy.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from t5train.errors import Unreadable

ABSENT = (FileNotFoundError, NotADirectoryError)
"""Errors that prove that a path does not exist."""

_REMEDIES = {
    errno.EACCES: "grant this user read access",
    errno.EPERM: "grant this user read access",
    errno.EIO: "check the disk and the kernel's log",
    errno.ESTALE: "mount the file system again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "free some memory",
}


def unreadable(path: Path, error: OSError) -> Unreadable:
    """The error to raise for a file or folder that could not be read."""
    remedy = _REMEDIES.get(error.errno or 0, "repair the disk or the permissions")
    return Unreadable(f"{path} cannot be read now ({error.strerror or error}): {remedy}, then start again")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn OSErrors into Unreadable for ``path``, except those that prove that it is absent."""
    try:
        yield
    except (*ABSENT, ConnectionError):
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def names_in(folder: Path) -> list[str]:
    """Names of everything in a folder, sorted; empty if the folder does not exist. Raises Unreadable."""
    try:
        with reading(folder):
            return sorted(path.name for path in folder.iterdir())
    except ABSENT:
        return []


def visible_in(folder: Path) -> list[Path]:
    """The entries of a folder except hidden ones, sorted by name; empty if it does not exist. Raises Unreadable."""
    return [folder / name for name in names_in(folder) if not name.startswith(".")]


def files_below(folder: Path) -> list[str]:
    """Relative paths of everything below a folder, except folders; a link to a folder is listed, not followed.

    Raises Unreadable.
    """
    found = []
    for name in names_in(folder):
        path = folder / name
        if path.is_symlink() or not is_folder(path):
            found.append(name)
        else:
            found += [f"{name}/{below}" for below in files_below(path)]
    return found


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. Raises Unreadable."""
    found = _stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_there(path: Path) -> bool:
    """Whether ``path`` exists. Raises Unreadable."""
    return _stat(path) is not None


def file_size(path: Path) -> int | None:
    """Size of a regular file in bytes; None if there is none. Raises Unreadable."""
    found = _stat(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def _stat(path: Path) -> os.stat_result | None:
    try:
        with reading(path):
            return path.stat()
    except ABSENT:
        return None

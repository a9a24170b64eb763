"""Runs a command on a host, provided that only this user can have written the code that it imports.

::

    python -I -S -c TEXT FOLDER COMMAND...

TEXT is the source of this module, because no code on the host can be trusted yet. FOLDER is
``/var/tmp/t5-pretrain-{uid}/code/{digest}``. Anyone can guess that path and create folders in ``/var/tmp``, so FOLDER
is checked first. Once the folder is known to be private, no other user can change it, so there is no gap between check
and use. Standard library only, and no imports from this project.
"""

import os
import stat
import sys

_OWN_LEVELS = 3  # the node folder, "code", and the digest
_NOT_FOUND, _NOT_PRIVATE = 127, 1


def fault(folder: str) -> str | None:
    """Why the code in a folder may come from another user; None if only this user can have written it."""
    own = [folder]
    while len(own) < _OWN_LEVELS:
        own.insert(0, _parent(own[0]))
    path = os.path.realpath(_parent(own[0]))
    above = [path]
    while path != "/":
        above.insert(0, path := _parent(path))
    try:
        return next(filter(None, [*map(_is_open, above), *map(_is_not_private, own)]), None)
    except OSError as error:
        return f"{error.filename} cannot be examined ({error.strerror}). Start again: the code is then sent again"


def _parent(path: str) -> str:
    """The parent of an absolute path, without pathlib, which every command would take some 20 ms to import."""
    return path.rpartition("/")[0] or "/"


def _is_not_private(folder: str) -> str | None:
    found = os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return None
    return (
        f"{folder} is not a folder that only user {os.getuid()} can access ({_described(found)}). Move that folder "
        "away, then start again"
    )


def _is_open(folder: str) -> str | None:
    """Why other users could replace the contents of a parent folder; None if they cannot."""
    found = os.lstat(folder)
    is_trusted = found.st_uid in {0, os.getuid()}
    if is_trusted and (not found.st_mode & 0o022 or found.st_mode & stat.S_ISVTX):
        return None
    return (
        f"other users can replace the contents of {folder} ({_described(found)}). Make root its owner, and remove the "
        "write access of others (chmod go-w) or set the sticky bit (chmod +t)"
    )


def _described(found: os.stat_result) -> str:
    return f"its owner is {found.st_uid}, its mode {stat.filemode(found.st_mode)}"


def main() -> None:
    """Check the folder, then replace this process with the command."""
    folder, *command = sys.argv[1:]
    if (found := fault(folder)) is not None:
        sys.stderr.write(f"refusing to run code from {folder}: {found}\n")
        sys.exit(_NOT_PRIVATE)
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument list, so that no shell reads it
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(_NOT_FOUND)


if __name__ == "__main__":
    main()

"""File locks, which the kernel releases however their holder ends, and private folders for lock files.

A lock excludes other processes of this machine. It does not exclude processes of other machines if the file system
keeps locks local to each client (NFS mounted with ``nolock`` or ``local_lock``, Lustre with ``localflock``). Standard
library only, as guards import it.
"""

import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from t5train.errors import StorageError
from t5train.files.os_errors import reason


def private_folder(folder: Path) -> Path:
    """Create a folder that only its owner can access, if it does not exist.

    Raises StorageError if it is a link, another user's, or open to others.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StorageError(f"{folder} cannot be created: {reason(error, folder)}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StorageError(
            f"{folder} is not a folder that only user {os.getuid()} can access (its owner is {found.st_uid}, its mode "
            f"{stat.filemode(found.st_mode)}). Move {folder} to another place; a new folder is then created"
        )
    return folder


_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    "nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|9p|afs|gfs2|ocfs2|orangefs|panfs|pvfs2|virtiofs|wekafs|fuse[.].*"
)


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4`` or ``nfs4``."""
    real, found, longest = os.path.realpath(path), "unknown", ""
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        mounted_on = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        is_above = real == mounted_on or real.startswith(mounted_on.rstrip("/") + "/")
        if is_above and len(mounted_on) >= len(longest):  # of two mounts at one path, the later one hides the other
            found, longest = after.split()[0], mounted_on
    return found


def is_network_file_system(path: Path) -> bool:
    """Whether ``path`` is on a network file system, so that other machines may use its files too."""
    return _NETWORK.fullmatch(file_system(path)) is not None


_LOOK_SECONDS = 0.1
_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def flock(descriptor: int, operation: int) -> None:
    """Call ``fcntl.flock``. Raises StorageError if the file system does not support locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise _no_locks(Path(f"/proc/self/fd/{descriptor}").readlink(), error) from error
        raise


def try_lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Try to take the exclusive lock of an open file, for up to ``seconds``. Returns whether it was taken."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        else:
            return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the exclusive lock of a file. To find out, this takes the shared lock briefly."""
    try:
        with open(path, "rb") as file:
            flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _no_locks(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be locked: its file system ({file_system(path)}) does not support flock ({error.strerror}). "
        "Mount it with locking (NFS: without nolock, with a running lock service; Lustre: with flock), or use a "
        "folder on another file system"
    )

"""Explain an error in one line; one of the operating system with the path, what is wrong with it, and what to do.

Standard library only, as guards and nodes import it.
"""

import errno
import io
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import FrameType

from t5train.errors import DiskFailed, DiskFull, StorageError, T5TrainError
from t5train.files.run_folder import CLAIM

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK_FAILED = frozenset({errno.EIO, errno.EROFS, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EUCLEAN})

_NO_INODES = (
    "the disk has no free inodes, one of which every file and folder takes, although it may have free bytes (`df -i`): "
    "remove files there, or use another folder"
)
_PERMISSION = (
    "give this user permission (check the folders above, too: `ls -ld` shows their modes), or use another path"
)
_REMEDIES = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "free some of this user's quota there, or use another folder",
    errno.EROFS: "check `dmesg` for a disk error; repair the disk and remount it, or use another folder",
    errno.EIO: "the disk or its connection fails: see `dmesg` and `smartctl -a`, then retry or use another folder",
    errno.ESTALE: "the file server no longer knows this file: mount the file system again, then start again",
    errno.EMFILE: "this process may not open more files: raise the limit (`ulimit -n`), then start again",
    errno.ENFILE: "this machine may not open more files: raise fs.file-max (`sysctl fs.file-max`)",
    errno.ENOENT: "check the path",
    errno.EEXIST: "a file or folder of that name exists: move it away, or use another path",
    errno.ENOTDIR: "a part of the path is a file: move it away, or use another path",
    errno.EISDIR: "a file is expected there: move the folder away, or use another path",
    errno.ELOOP: "the path's symbolic links form a loop: remove one of the links",
    errno.ENAMETOOLONG: "use a shorter path or name",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or use another file system",
    errno.ENOLCK: "the file system has run out of locks, or has none: check how it is mounted",
    errno.ENXIO: "the disk is gone: see `dmesg`, and mount the disk again",
    errno.ENODEV: "the disk is gone: see `dmesg`, and mount the disk again",
    errno.EUCLEAN: "the file system is damaged: see `dmesg`, and run fsck",
    errno.ENOMEM: "free some memory on this machine",
}


def explain(error: OSError) -> str:
    """Return one line: the path if it is known, the system's message, and the remedy."""
    path = None if isinstance(error, ConnectionError | TimeoutError) or error.errno is None else path_of(error)
    return f"{path}: {reason(error, path)}" if path else reason(error)


def reason(error: OSError, path: PurePath | str | None = None) -> str:
    """Return the system's message and the remedy, for a message that names the ``path`` already."""
    said = error.strerror or " ".join(str(error).split()) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    if error.errno == errno.ENOSPC and lacks_inodes(path):
        remedy = _NO_INODES
    elif error.errno == errno.ENOENT and path and _is_of_stage(Path(path)):
        remedy = "a finished stage has lost this file: `t5-pretrain run` with the same settings makes it again"
    return f"{said}; {remedy}" if remedy else said


def _is_of_stage(file: Path) -> bool:
    """Whether a path is in the folder of a finished data stage, which makes its files again if some are gone."""
    return all(Path(file.parent, name).exists() for name in (CLAIM, "manifest.json"))


def nearest_existing(path: Path) -> Path:
    """Return ``path``, or its nearest parent that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def free_inodes(path: PurePath | str) -> int | None:
    """How many more files and folders the disk of an existing path can hold; None if it sets no limit."""
    found = os.statvfs(path)
    return found.f_favail if found.f_files else None


def lacks_inodes(path: PurePath | str | None) -> bool:
    """Whether the disk on which a path is, or would be, is full because it has no inodes left."""
    if path is None:
        return False
    try:
        return free_inodes(nearest_existing(Path(path))) == 0
    except OSError:
        return False  # the path cannot be inspected


def in_one_line(error: BaseException) -> str:
    """Return what an error says in one line. Its class is named only if the rest says nothing, as a KeyError's does."""
    if isinstance(error, OSError):
        return explain(error)
    said = " ".join(str(error).split())
    is_sentence = " " in said and not isinstance(error, KeyError)
    if is_sentence or (said and isinstance(error, T5TrainError)):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def path_of(error: OSError) -> str | None:
    """The path that an error is about; None if it cannot be determined.

    The system names no path when a read, write or sync fails. In that case, this is the file that the innermost
    function of the traceback has open, or otherwise a path among its local variables.
    """
    named = [_text(name) for name in (error.filename, error.filename2) if name is not None]
    if named:
        return " -> ".join(named)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = (names for frame in reversed(frames) if (names := _open_files(frame) or _paths(frame)))
    return " or ".join(next(found, [])) or None


def of_rank(error: OSError | StorageError) -> T5TrainError:
    """Classify the disk error that ended a rank as DiskFull, DiskFailed or, if it is neither, StorageError."""
    cause = cause_of(error)
    number = cause.errno if cause else None
    text = explain(error) if isinstance(error, OSError) else str(error)
    if number in _NO_SPACE:
        return DiskFull(text)
    return DiskFailed(text) if number in _DISK_FAILED else StorageError(text)


@contextmanager
def naming(path: PurePath) -> Iterator[None]:
    """Add ``path`` to file system errors in the block that name no path, such as those of a read, write or sync."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # of the network
        raise
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def library_errors(library: str, folder: PurePath) -> Iterator[None]:
    """Turn whatever a library raises in the block into a StorageError that names the folder it works on.

    Libraries written in Rust raise a bare Exception without a path if a file cannot be read or written, and others
    guess the cause, for example with a ValueError about a missing package.
    """
    try:
        yield
    except T5TrainError:
        raise
    except Exception as error:
        raise StorageError(
            f"{folder}: {library} failed on its files ({in_one_line(error)}); check that they can be read "
            "and written, then try again"
        ) from error


@contextmanager
def as_storage_errors() -> Iterator[None]:
    """Turn file system errors in the block, or in the decorated function, into StorageErrors."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # of the network
        raise
    except OSError as error:
        raise StorageError(explain(error)) from error


def cause_of(error: BaseException) -> OSError | None:
    """The OSError that an error is, or was raised from; None if there is none."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__
    return found


def _text(name: object) -> str:
    if isinstance(name, int):  # a descriptor was passed instead of a path
        return f"file descriptor {name}"
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name)


def _open_files(frame: FrameType) -> list[str]:
    files = [value for value in frame.f_locals.values() if isinstance(value, io.IOBase)]
    return _distinct(name for file in files if isinstance(name := getattr(file, "name", None), str))


def _paths(frame: FrameType) -> list[str]:
    return _distinct(str(value) for value in frame.f_locals.values() if isinstance(value, PurePath))[:1]


def _distinct(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(names))

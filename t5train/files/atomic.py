"""Write, remove and move aside files and folders: wholly or not at all, even after a power failure."""

import errno
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

from t5train.errors import StorageError
from t5train.files.locks import try_lock
from t5train.files.os_errors import explain, naming, path_of
from t5train.files.presence import ABSENT

_log = logging.getLogger(__name__)
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file beside ``path`` that replaces ``path`` on success and is removed on failure.

    The data is on disk before the name is: fsync of the file, rename, fsync of the folder. The file is created with
    ``mode``, less the umask. Raises StorageError if the disk is full or read-only, and for other failures an OSError
    that names ``path``.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)
        named = _naming(path, temporary, error)
        raise (StorageError(explain(named)) if error.errno in _CANNOT_WRITE else named) from error
    except BaseException:
        _remove(temporary)
        raise
    sync_folder(path.parent)


def _remove(temporary: Path) -> None:
    with suppress(OSError):  # the first error says more, and the .tmp name marks the file as disposable
        temporary.unlink()


def _naming(path: Path, temporary: Path, error: OSError) -> OSError:
    """The error with ``path`` as its file. An error about another file that the block used is returned unchanged."""
    about = path_of(error) if error.errno is not None else None
    if error.errno is None or (about is not None and str(temporary) not in about and error.errno not in _CANNOT_WRITE):
        return error
    return OSError(error.errno, error.strerror, str(path))


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` with ``text`` (UTF-8), atomically."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace the content of ``path`` with ``value`` as indented JSON with sorted keys, atomically."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_writing(folder: Path, num_bytes: int = 1) -> None:
    """Write a temporary file to a folder. Raises OSError if it cannot be written.

    Permissions alone do not reveal a read-only or full file system.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(num_bytes))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def filling(path: Path, *, keep_unfinished: bool = False) -> Iterator[Path]:
    """Yield the ``partial_folder`` of ``path``, which becomes ``path`` on success.

    At that point, ``path`` must be absent or an empty folder, and the bytes of the files must already be on disk
    (``copy_durably`` ensures that). This function makes their names durable.
    """
    with partial_folder(path, keep_unfinished=keep_unfinished) as partial:
        yield partial
        _take_place(partial, path)


@contextmanager
def partial_folder(path: Path, *, keep_unfinished: bool = False) -> Iterator[Path]:
    """Yield an empty folder ``.{name}.partial`` beside ``path``, and remove it at the end unless it was moved.

    Files that a killed process left in it are removed first. With ``keep_unfinished``, the folder and its files stay
    instead, so that the next call can continue with them. Raises StorageError if another live process is filling the
    same folder, if it cannot be created, or if it is a link; with ``keep_unfinished``, also if it is another user's.
    """
    partial = partial_of(path)
    if partial.is_symlink():
        raise StorageError(f"{partial} is a symbolic link, which would be followed: remove it, then try again")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = _lock(partial)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {explain(error)}") from error
    try:
        if keep_unfinished:
            _require_own(partial)
        else:
            _clear(partial)
        yield partial
    finally:
        if not keep_unfinished and _is_open_as(
            partial, lock
        ):  # otherwise it was moved, and a folder of this name is another process's
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def partial_of(path: Path) -> Path:
    """The path of the folder that ``partial_folder`` yields."""
    return path.with_name(f".{path.name}.partial")


def discard(path: Path) -> None:
    """Remove a folder if it exists, and what an interrupted removal left of it. Its name is free at once."""
    aside = path.with_name(f".{path.name}.discarded")
    try:
        if aside.exists():
            remove_folder(aside)
        if path.exists():
            path.rename(aside)
            remove_folder(aside)
    except OSError as error:
        raise StorageError(f"{path} cannot be removed: {explain(error)}. Or remove {path} yourself") from error


def remove_folder(folder: Path) -> None:
    """Remove a folder and all its content. An OSError names the whole path, not only its last part."""
    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=_raise_for)
    else:
        shutil.rmtree(folder, onerror=lambda function, path, info: _raise_for(function, path, info[1]))


def _raise_for(_: Callable[..., Any], path: str, error: BaseException) -> None:
    if isinstance(error, OSError) and error.errno is not None:
        raise OSError(error.errno, error.strerror, path) from error
    raise error


def rename_aside(path: Path) -> Path:
    """Rename a file or folder to the first free ``{name}.aside-{number}`` beside it, and return that path."""
    for number in count(1):
        aside = path.with_name(f"{path.name}.aside-{number}")
        if not os.path.lexists(aside):
            break
    try:
        path.rename(aside)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be moved to {aside}: {explain(error)}. Or move {path} to another place yourself"
        ) from error
    return aside


def set_aside(path: Path, into: Path, why: str) -> Path | None:
    """Rename a file or folder to a unique name in the folder ``into``, durably; None if it no longer exists.

    This is for files that must be neither used nor lost, such as a damaged checkpoint that is newer than the one that
    training resumes from. Neither pruning nor garbage collection touches a folder called ``set-aside``. Raises
    StorageError if it cannot be renamed, for example to another disk; then it stays where it is.
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


def remove_discarded(parent: Path) -> None:
    """Remove what interrupted calls of ``discard`` left of folders in ``parent``. New folders of those names stay."""
    for aside in parent.glob(".*.discarded"):
        try:
            remove_folder(aside)
        except OSError as error:
            raise StorageError(f"{aside} cannot be removed: {explain(error)}. You can also remove it") from error


def copy_durably(source: Path, target: Path) -> None:
    """Copy the bytes of a file to a new name and wait until they are on disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as read, open(target, "xb") as written:
        shutil.copyfileobj(read, written, 8 << 20)
        written.flush()
        os.fsync(written.fileno())


def _lock(partial: Path) -> int:
    """A descriptor that holds the folder's lock. The kernel releases the lock however this process ends."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locked = try_lock(descriptor)
    # The previous holder of the lock may have renamed the folder. Then it is finished and must not be cleared.
    if not (locked and _is_open_as(partial, descriptor)):
        os.close(descriptor)
        raise StorageError(f"{partial} is being filled by another process: wait for it to end, then try again")
    return descriptor


def _require_own(folder: Path) -> None:
    """Raise StorageError if another user can change what is in a folder, because it is theirs.

    The owner of new files is compared, because some network file systems give them to another user than this one.
    """
    owner = folder.stat().st_uid
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            is_own = os.fstat(file.fileno()).st_uid == owner
    except PermissionError as error:
        if owner == os.geteuid():
            raise StorageError(f"{folder} cannot be written: {explain(error)}") from error
        is_own = False
    if not is_own:
        raise StorageError(f"{folder} belongs to another user ({owner}), who could change what is in it: remove it")


def _is_open_as(path: Path, descriptor: int) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(entry)
        else:
            entry.unlink()


def _take_place(partial: Path, path: Path) -> None:
    for folder, _, _ in os.walk(partial):
        sync_folder(Path(folder))
    try:
        partial.rename(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be put in place: {explain(error)}. If there is already a file or folder of that name, "
            "remove or rename it"
        ) from error
    sync_folder(path.parent)

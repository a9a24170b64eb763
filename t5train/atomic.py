"""Files that are there whole or not at all, also after a power cut."""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from t5train.errors import StorageError
from t5train.os_errors import explain, naming, path_of

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file beside ``path`` that takes its place on success and vanishes on failure.

    The data is on disk before the name is: fsync of the file, rename, fsync of the folder. The file has ``mode``,
    less the umask, from the moment it exists. Raises StorageError when the disk is full or read-only, else an OSError
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
    with suppress(OSError):  # the first error says more, and the name says that the file is nobody's
        temporary.unlink()


def _naming(path: Path, temporary: Path, error: OSError) -> OSError:
    """The error, about ``path``; one about another file, from which the block may have read, stays as it is."""
    about = path_of(error) if error.errno is not None else None
    if error.errno is None or (about is not None and str(temporary) not in about and error.errno not in _CANNOT_WRITE):
        return error
    return OSError(error.errno, error.strerror, str(path))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8), atomically."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON with sorted keys, atomically."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

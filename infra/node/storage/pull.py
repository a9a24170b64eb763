"""Fetches files. A file is verified while it arrives, appears only once it is whole, and can be resumed.

Standard library only, as nodes import it.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from infra.node.channel import CHUNK_BYTES
from infra.node.node_folders import within
from infra.node.storage.file_channel import Content, Refused, Source, Wanted, Watcher
from t5train.errors import DigestMismatch, StorageError, Unreadable
from t5train.files.atomic import set_aside, sync_folder
from t5train.files.os_errors import reason
from t5train.files.presence import ABSENT, file_size, reading


def listed(folder: Path, names: Iterable[str]) -> list[Wanted]:
    """The files named ``names`` in a folder, and all files in subfolders with these names, with their digests."""
    return [_as_it_is(folder, path) for name in names for path in _files(within(folder, name))]


def partial_path(path: Path) -> Path:
    """The path at which a file arrives until it is whole."""
    return path.with_name(f".{path.name}.part")


def is_whole(folder: Path, wanted: Wanted) -> bool:
    """Whether the file exists with this or an equivalent content. Raises Unreadable if it cannot be read now."""
    path = within(folder, wanted.name)
    good = {Content(wanted.size, wanted.sha256), *wanted.as_good}
    if file_size(path) not in {each.size for each in good}:
        return False
    try:
        digest, size = _hash_of(path)
    except ABSENT:
        return False
    return Content(size, digest.hexdigest()) in good


def missing_bytes(folder: Path, wanted: Iterable[Wanted]) -> int:
    """How many more bytes the disk must have free for all files, judging by the sizes of existing ones."""
    return sum(max(0, each.size - _size(within(folder, each.name), each.size)) for each in wanted)


def pull(source: Source, wanted: Iterable[Wanted], folder: Path, watcher: Watcher, aside: Path | None = None) -> None:
    """Fetch the files that ``folder`` lacks, in the given order; intact files are kept.

    A file that exists but cannot be read now is moved to the folder ``aside`` once an intact copy has arrived. Bytes
    that have arrived are kept, so that a later call continues there. Raises Unreadable if a file cannot be read now and
    ``aside`` is None, DigestMismatch if a file arrives twice with another digest, Refused if the source cannot send it,
    StorageError if it cannot be written, and what ``source`` raises.
    """
    for each in wanted:
        path, keep = within(folder, each.name), None
        try:
            whole = is_whole(folder, each)
        except Unreadable:
            if aside is None:
                raise
            whole, keep = False, aside
        if not whole:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _pull_file(source, each, path, watcher, keep)
        watcher.whole(each)


def _pull_file(source: Source, wanted: Wanted, path: Path, watcher: Watcher, keep: Path | None) -> None:
    """Fetch a file. If ``keep`` is given, the existing file at its path is moved to that folder."""
    partial = partial_path(path)
    for last in (False, True):  # a second try, because the part that existed may be damaged
        try:
            found = _grow(source, wanted, partial, watcher)
            if found == wanted.sha256:
                if keep is not None:
                    set_aside(path, keep, "it could not be read, and an intact copy has arrived")
                partial.replace(path)
                sync_folder(path.parent)
                return
        except Refused:
            if last:
                raise
            found = "none"  # it arrived damaged at the source, which receives it again
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise StorageError(f"{path} cannot be written: {reason(error, path)}. Then start again") from error
        partial.unlink(missing_ok=True)
        if last:
            raise DigestMismatch(
                f"the source of {path} is damaged: it arrived with sha256 {found}, but {wanted.sha256} was recorded"
            )


def _grow(source: Source, wanted: Wanted, partial: Path, watcher: Watcher) -> str:
    """Append the missing bytes, and sync the file to disk; returns the sha256 of the whole file."""
    digest, size = hashlib.sha256(), 0
    if partial.exists():
        digest, size = _hash_of(partial)
    if size > wanted.size:
        partial.unlink()
        digest, size = hashlib.sha256(), 0
    with open(partial, "ab", buffering=0, opener=_private) as file:
        watcher.begun(wanted, size)
        for chunk in source(wanted.name, size, wanted.size):
            _write(file.fileno(), chunk)
            digest.update(chunk)
            watcher.grown(wanted, len(chunk))
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write(descriptor: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _hash_of(path: Path) -> "tuple[hashlib._Hash, int]":
    digest, size = hashlib.sha256(), 0
    with reading(path), open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest, size


def _size(path: Path, most: int) -> int:
    """Existing bytes of the whole or partial file. A file that cannot be read now does not count: it is refetched."""
    for each in (path, partial_path(path)):
        with suppress(Unreadable):
            if (size := file_size(each)) is not None:
                return min(size, most)
    return 0


def _as_it_is(folder: Path, path: Path) -> Wanted:
    digest, size = _hash_of(path)
    return Wanted(str(path.relative_to(folder)), size, digest.hexdigest())


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.startswith("."))

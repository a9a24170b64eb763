"""Files taken from elsewhere: each verified while it comes, whole or not there, and gone on with after a break.

Standard library only, as nodes import it.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from infra.node_store.paths import within
from infra.node_store.wire import CHUNK_BYTES, Refused, Source
from t5train.atomic import sync_folder
from t5train.errors import DigestMismatch, StorageError

if TYPE_CHECKING:
    from t5train.records import FileDigest

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Wanted:
    """A file by its name within a folder, its size in bytes and its sha256.

    ``as_good`` are sizes and digests of other bytes that say the same: what is there as one of them is left.
    """

    name: str
    size: int
    sha256: str
    as_good: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, name: str, digest: "FileDigest") -> Self:
        """What a record says of a file."""
        return cls(name, digest.size, digest.sha256)

    def to_json(self) -> dict[str, Any]:
        """Such that ``Wanted(**...)`` is the same."""
        return asdict(self)


class Watcher:
    """Told how far files have come; to be overridden."""

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:
        """``size`` bytes of it are in ``path`` by now, to which more will be added."""

    def grown(self, wanted: Wanted, count: int) -> None:
        """``count`` more are."""

    def whole(self, wanted: Wanted) -> None:
        """It is in place, and verified."""


def listed(folder: Path, names: Iterable[str]) -> list[Wanted]:
    """Files of a folder called ``names``, and all in folders of it that are called so; what to ``restore`` of them."""
    return [_as_it_is(folder, path) for name in names for path in _files(within(folder, name))]


def partial_path(path: Path) -> Path:
    """Where a file grows until it is whole."""
    return path.with_name(f".{path.name}.part")


def is_whole(folder: Path, wanted: Wanted, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
    """Whether the file is there with this very content, or one as good."""
    path = within(folder, wanted.name)
    good = {(wanted.size, wanted.sha256), *((size, sha256) for size, sha256 in wanted.as_good)}
    if not path.is_file() or path.stat().st_size not in {size for size, _ in good}:
        return False
    digest, size = _hash_of(path, on_bytes)
    return (size, digest.hexdigest()) in good


def missing_bytes(folder: Path, wanted: Iterable[Wanted]) -> int:
    """How much more the disk must hold until all are there, judged by sizes."""
    return sum(max(0, each.size - _size(within(folder, each.name), each.size)) for each in wanted)


def pull(source: Source, wanted: Iterable[Wanted], folder: Path, watcher: Watcher) -> None:
    """Take what ``folder`` lacks, in that order; what is there whole is left.

    Raises DigestMismatch where what comes has another digest twice, Refused where nothing does, StorageError when the
    disk is full, and what ``source`` raises; what has come stays for the next time.
    """
    for each in wanted:
        path = within(folder, each.name)
        if not is_whole(folder, each):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _pull_file(source, each, path, watcher)
        watcher.whole(each)


def _pull_file(source: Source, wanted: Wanted, path: Path, watcher: Watcher) -> None:
    partial = partial_path(path)
    for last in (False, True):  # a part that was there may be damaged, so it gets a second try
        try:
            found = _grow(source, wanted, partial, watcher)
        except Refused:
            if last:
                raise
            found = "none"  # what had come was damaged there, and is there anew
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StorageError(
                    f"{path} cannot be written: {error.strerror}; make room, then start again"
                ) from error
            raise
        if found == wanted.sha256:
            partial.replace(path)
            sync_folder(path.parent)
            return
        partial.unlink(missing_ok=True)
        if last:
            raise DigestMismatch(
                f"{path} came with sha256 {found}, {wanted.sha256} was recorded: its source is damaged"
            )


def _grow(source: Source, wanted: Wanted, partial: Path, watcher: Watcher) -> str:
    """Add what is missing; the sha256 of all of it, once that is on disk."""
    digest, size = hashlib.sha256(), 0
    if partial.exists():
        digest, size = _hash_of(partial)
    if size > wanted.size:
        partial.unlink()
        digest, size = hashlib.sha256(), 0
    with open(partial, "ab", buffering=0, opener=_private) as file:
        watcher.begun(wanted, partial, size)
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


def _hash_of(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> "tuple[hashlib._Hash, int]":
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            on_bytes(len(chunk))
    return digest, size


def _size(path: Path, most: int) -> int:
    """Bytes of it that are there, whole or in part."""
    for each in (path, partial_path(path)):
        if each.is_file():
            return min(each.stat().st_size, most)
    return 0


def _as_it_is(folder: Path, path: Path) -> Wanted:
    digest, size = _hash_of(path)
    return Wanted(str(path.relative_to(folder)), size, digest.hexdigest())


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.startswith("."))

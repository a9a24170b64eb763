"""A download on disk: its note, and a file that is not complete yet.

Beside a download lies its note: state, size and sha256. While it is incomplete, it is called ``.{name}.part``, and a
note of it says how many bytes of which state are known to be on disk; another start continues there.
"""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from t5train.data.download.parquet_columns import Columns
from t5train.data.download.remote_reading import RemoteFile
from t5train.errors import DigestMismatch, StorageError
from t5train.files.atomic import sync_folder, write_json
from t5train.files.os_errors import explain
from t5train.files.output_folder import DOWNLOADED
from t5train.host_resources import num_cores
from t5train.records.digests import FileDigest, verify_file

DURABLE_BYTES = 64 << 20
"""After so many bytes, a part of a file is written to disk and noted, so that another start continues there."""
_log = logging.getLogger(__name__)


class Missing(NamedTuple):
    """A file that is not on this machine, or only in part."""

    file: RemoteFile
    local: Path
    expected: str | None
    """Its sha256, if the store or an earlier download of the same state says it."""
    has_ranges: bool
    part_bytes: int
    """Bytes of it that are on disk."""
    columns: Columns | None
    """Of a .parquet file: the columns to fetch in place of the whole file."""

    @property
    def size_bytes(self) -> int | None:
        """How much is to be fetched in all; None if the store does not report it."""
        return self.file.size if self.columns is None else self.columns.size_bytes


class Note(NamedTuple):
    """What is known of a complete download."""

    state: str
    """The store's state of the file that it is a copy of."""
    content: FileDigest
    whole: FileDigest | None
    """What the download stands for: if only columns were fetched, the whole file, as the store states its digest; of
    rows that were streamed, their lines before compression. None for a copy."""

    @property
    def stands_for(self) -> FileDigest:
        """The digest that identifies the text, however it was transferred."""
        return self.whole or self.content

    def is_of(self, file: RemoteFile) -> bool:
        """Whether this is a copy of the present state of a file."""
        if file.sha256 is not None:
            return self.stands_for.sha256 == file.sha256
        return self.state == file.state and file.size in {None, self.stands_for.size}


def read_note(local: Path) -> Note | None:
    """Return the note of a download; None if there is none, or if it is damaged."""
    try:
        noted = json.loads(_note(local).read_bytes())
        content = FileDigest(size=noted["size"], sha256=noted["sha256"])
        return Note(str(noted["state"]), content, FileDigest(**noted["whole"]) if noted.get("whole") else None)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENAMETOOLONG}:
            raise
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("the record of the download of %s is damaged: %s", local, error)
        return None


def write_note(local: Path, note: Note) -> None:
    """Write the note of a complete download."""
    whole = {} if note.whole is None else {"whole": note.whole.model_dump()}
    write_json(_note(local), {"state": note.state, **note.content.model_dump(), **whole})


def whole_digest(local: Path) -> FileDigest | None:
    """Return the digest of what a download stands for; None for a copy, and for any other file."""
    note = read_note(local)
    return None if note is None else note.whole


def is_whole(local: Path, note: Note) -> bool:
    """Return whether a download has the content that was noted. Raises Unreadable if it cannot be read now."""
    try:
        verify_file(local, note.content)
    except DigestMismatch as error:
        _log.warning("the download of %s is damaged: %s", local, error)
        return False
    return True


def whole_copies(places: Sequence[Path]) -> list[bool]:
    """Return for each place whether a download is there that has the content that was noted."""

    def is_intact(place: Path) -> bool:
        note = read_note(place)
        return note is not None and is_whole(place, note)

    with ThreadPoolExecutor(num_cores()) as pool:  # hashing releases the GIL
        return list(pool.map(is_intact, places))


def part_bytes(local: Path, file: RemoteFile) -> int:
    """Return how many bytes of the present state of a file are on disk."""
    try:
        noted = json.loads(_part_note(local).read_bytes())
        is_there = 0 < noted["bytes"] <= min(file.size or 0, _part(local).stat().st_size)
        is_same = (noted["state"], noted["size"]) == (file.state, file.size)
        return int(noted["bytes"]) if is_there and is_same else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0  # not begun, or killed before the first note


class PartialFile:
    """A file that is being downloaded: its bytes so far, and their digest. A context manager that closes it."""

    def __init__(self, each: Missing) -> None:
        self._each = each
        self.path = _part(each.local)
        self._digest, self._size = hashlib.sha256(), 0
        self._durable = each.part_bytes
        with _writing(self.path):
            self._file: IO[bytes] = open(self.path, "r+b" if each.part_bytes else "w+b")  # noqa: SIM115 - __exit__ closes it

    def __enter__(self) -> Self:
        self._file.truncate(self._each.part_bytes)
        self._hash()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            is_of_blocks = self._each.has_ranges and self._each.columns is None
            if error is not None and not isinstance(error, StorageError) and is_of_blocks:
                self._make_durable()  # so that another start continues here
        finally:
            self._file.close()

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with _writing(self.path):
            self._file.write(content)
        self._digest.update(content)
        self._size += len(content)
        if self._size - self._durable >= DURABLE_BYTES:
            self._make_durable()

    def replace_by(self, other: Path) -> None:
        """Take the content of another file, which is renamed."""
        other.replace(self.path)
        self.hash_from_disk()

    def hash_from_disk(self) -> None:
        """Compute the digest of what another function wrote to ``path``."""
        self._digest, self._size = hashlib.sha256(), 0
        self._file.close()
        self._file = open(self.path, "r+b")  # noqa: SIM115 - __exit__ closes it
        self._hash()

    def finish(self) -> tuple[int, str]:
        """Write everything to disk. Returns size and sha256."""
        with _writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._size, self._digest.hexdigest()

    def keep(self, size: int, sha256: str) -> None:
        """Give the file its name, and write its note."""
        local = self._each.local
        self.path.replace(local)
        sync_folder(local.parent)
        file, has_columns = self._each.file, self._each.columns is not None
        whole = FileDigest(size=file.size or 0, sha256=file.sha256 or "") if has_columns else None
        write_note(local, Note(file.state, FileDigest(size=size, sha256=sha256), whole))
        _part_note(local).unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Rename the file, and return its new path: nothing reads it any more, but its user may."""
        bad = self._each.local.with_name(f"{self._each.local.name}.bad")
        self.path.replace(bad)
        _part_note(self._each.local).unlink(missing_ok=True)
        return bad

    def remove(self) -> None:
        """Remove the file and its note."""
        self.path.unlink(missing_ok=True)
        _part_note(self._each.local).unlink(missing_ok=True)

    def _hash(self) -> None:
        self._file.seek(0)
        while chunk := self._file.read(1 << 20):
            self._digest.update(chunk)
            self._size += len(chunk)

    def _make_durable(self) -> None:
        self.finish()
        self._durable = self._size
        file = self._each.file
        write_json(_part_note(self._each.local), {"state": file.state, "size": file.size, "bytes": self._size})


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert the system's error about a file."""
    try:
        yield
    except OSError as error:
        raise StorageError(explain(OSError(error.errno, error.strerror, str(path)))) from error


def _note(local: Path) -> Path:
    return local.with_name(f"{local.name}{DOWNLOADED}")


def _part(local: Path) -> Path:
    return local.with_name(f".{local.name}.part")


def _part_note(local: Path) -> Path:
    return local.with_name(f".{local.name}.part.json")

"""Files that are published: checksums of their content, and bodies of requests that must be what was read before.

A file's sha256 and its CRC are computed from the same bytes in one pass. So an object with this CRC is the certified
file, although S3 knows no sha256 of an object that was uploaded in parts.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from t5train.errors import DigestMismatch
from t5train.files.os_errors import naming
from t5train.progress import Progress
from t5train.records.digests import FileDigest, verify_file
from t5train.release.object_store.bucket import crc_of
from t5train.release.object_store.transfers import ByteCount, run_jobs

BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10  # stays in a core's cache: a whole part in memory takes twice the CPU time


class MeasuredFile(NamedTuple):
    """A file that had the recorded digest when it was read, and the CRCs of its blocks."""

    path: Path
    digest: FileDigest
    block_crcs: list[int]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.digest.size

    @property
    def crc(self) -> int:
        """The CRC of the whole file."""
        return self.crc_of(0, self.size)

    def crc_of(self, start: int, size: int) -> int:
        """Return the CRC of a part of the file. Parts consist of whole blocks, except the last."""
        from awscrt.checksums import combine_crc64nvme

        whole = 0
        for at in range(start, start + size, BLOCK_BYTES):
            crc = self.block_crcs[at // BLOCK_BYTES]
            whole = combine_crc64nvme(whole, crc, min(BLOCK_BYTES, start + size - at))
        return whole


def measure(folder: Path, digests: Mapping[str, FileDigest], progress: Progress) -> dict[str, MeasuredFile]:
    """Read the files of a folder, several at a time. Raises DigestMismatch if one does not have its digest."""
    count = ByteCount("bytes verified", sum(digest.size for digest in digests.values()), progress)
    measured = dict[str, MeasuredFile]()

    def read(name: str) -> None:
        measured[name] = _measured(folder / name, digests[name], count.add)

    run_jobs((partial(read, name) for name in digests), count)
    return {name: measured[name] for name in digests}


def _measured(path: Path, expected: FileDigest, count: Callable[[int], None]) -> MeasuredFile:
    if not path.is_file() or path.stat().st_size != expected.size:
        verify_file(path, expected)  # says what is wrong
    sha256, crcs, size = hashlib.sha256(), list[int](), 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with naming(path), open(path, "rb") as file:
        while filled := file.readinto(buffer):
            sha256.update(buffer[:filled])
            crcs.append(crc_of(buffer[:filled]))
            size += filled
            count(filled)
    if FileDigest(size=size, sha256=sha256.hexdigest()) != expected:
        verify_file(path, expected)
        raise DigestMismatch(f"{path} was changed while it was read, and changed back: publish again")
    return MeasuredFile(path, expected, crcs)


class FileBody:
    """A body that botocore can send, and send again.

    botocore would take an error of a body for one of the connection, and the server would wait for what is missing. So
    this body always has its full size, with zeros where the file cannot be read, and ``opened`` raises at its end.
    """

    def __init__(self, file: int, start: int, size: int, count: Callable[[int], None]) -> None:
        """``file`` is a descriptor."""
        self._file, self._start, self._size, self._count = file, start, size, count
        self._buffer = memoryview(bytearray(min(_PIECE_BYTES, size)))
        self._at, self._crc = 0, 0
        self._error: OSError | None = None

    @classmethod
    @contextmanager
    def opened(cls, path: Path, start: int, size: int, crc: int, count: Callable[[int], None]) -> Iterator[Self]:
        """Open a part of a file, to send it.

        ``count`` is called with the size of each piece that is sent, and if the body is sent again, first with minus
        what was counted. It may raise Stopped, which gives the request up.

        Raises DigestMismatch at the end, instead of the server's error, if the CRC of what was sent is not ``crc``;
        OSError if it could not be read.
        """
        with naming(path), open(path, "rb", buffering=0) as file:
            body = cls(file.fileno(), start, size, count)
            try:
                yield body
            finally:
                body._require_intact(path, crc)

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        """Return the position, as a file does."""
        return self._at

    def seek(self, _: int) -> None:
        """Go back to the start: botocore does that before it sends the body again, and seeks nothing else."""
        self._count(-self._at)
        self._at, self._crc = 0, 0

    def read(self, _: int = -1) -> memoryview:
        """Return the next piece, whatever size is asked for. It is valid until the next call."""
        piece = self._buffer[: self._size - self._at]
        try:
            count = os.preadv(self._file, [piece], self._start + self._at)
        except OSError as error:
            self._error, count = error, 0
        if not count:
            piece[:], count = bytes(len(piece)), len(piece)
        self._crc = crc_of(piece[:count], self._crc)
        self._at += count
        self._count(count)
        return piece[:count]

    def _require_intact(self, path: Path, crc: int) -> None:
        if self._error is not None:
            raise self._error
        if self._at == self._size and self._crc != crc:
            raise DigestMismatch(f"{path} was changed while it was sent: restore it, then publish again")

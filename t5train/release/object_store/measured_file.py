"""Files that are published: what is known of their content, and bodies of requests that must be what was read before.

A file's sha256 and its CRC are computed from the same bytes in one pass. So an object with this CRC is the certified
file, although S3 knows no sha256 of an object that was uploaded in parts.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import NoReturn, Self

from t5train.errors import DigestMismatch
from t5train.files.os_errors import naming
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, verify_file
from t5train.release.object_store.bucket import crc_of
from t5train.release.object_store.transfers import ByteCount, Job, run_jobs

BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10  # stays in a core's cache: a whole part in memory takes twice the CPU time


class MeasuredFile:
    """A file that is read once, block by block, for its sha256 and the CRC of every part.

    One thread at a time reads on. Others may meanwhile send what has been read.
    """

    def __init__(self, path: Path, expected: FileDigest) -> None:
        """``expected`` is the digest that was recorded."""
        self.path, self.digest = path, expected
        self._sha256, self._blocks, self._at = hashlib.sha256(), list[int](), 0
        self._crc: int | None = None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.digest.size

    @property
    def unread_bytes(self) -> int:
        """How much has not been read yet."""
        return self.size - self._at

    @property
    def is_read(self) -> bool:
        """Whether all of the file was read, and is what was recorded."""
        return self._crc is not None

    @property
    def crc(self) -> int:
        """The CRC of the whole file, once ``is_read``."""
        if self._crc is None:
            raise ValueError(f"{self.path} has not been read to its end")
        return self._crc

    def require_size(self) -> None:
        """Raise DigestMismatch if the file is missing or has another size than was recorded."""
        if not self.path.is_file() or self.path.stat().st_size != self.size:
            self._refuse()

    def read_to(self, end: int, count: Callable[[int], None] = lambda _: None) -> None:
        """Read on up to ``end``, which is a multiple of ``BLOCK_BYTES`` or the file's size.

        ``count`` is called with the size of each block. Raises DigestMismatch if the file, once it is read to its end,
        is not what was recorded, or if it is missing.
        """
        if self.is_read:
            return
        self.require_size()
        with naming(self.path), open(self.path, "rb", buffering=0) as file:
            file.seek(self._at)
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while self._at < end and (filled := _read_into(buffer[: end - self._at], file)):
                self._add(buffer[:filled])
                count(filled)
        if self._at < end:
            self._refuse()
        if end == self.size:
            self._finish()

    def read_whole(self) -> bytes:
        """Return the content of a small file. Raises DigestMismatch if it is not what was recorded."""
        self.require_size()
        with naming(self.path):
            content = self.path.read_bytes()
        self._sha256, self._blocks, self._at = hashlib.sha256(), [], 0
        for start in range(0, len(content), BLOCK_BYTES):
            self._add(memoryview(content)[start : start + BLOCK_BYTES])
        self._finish()
        return content

    def crc_of(self, start: int, size: int) -> int:
        """Return the CRC that a part had when it was read. Parts consist of whole blocks, except the last."""
        first = start // BLOCK_BYTES
        return _joined(self._blocks[first : first - (-size // BLOCK_BYTES)], size)

    def _add(self, block: memoryview) -> None:
        self._sha256.update(block)
        self._blocks.append(crc_of(block))
        self._at += len(block)

    def _finish(self) -> None:
        if FileDigest(size=self._at, sha256=self._sha256.hexdigest()) != self.digest:
            self._refuse()
        self._crc = _joined(self._blocks, self.size)

    def _refuse(self) -> NoReturn:
        verify_file(self.path, self.digest)  # says what is wrong
        raise DigestMismatch(f"{self.path} was changed while it was read, and changed back: publish again")


def unread_files(folder: Path, digests: Mapping[str, FileDigest]) -> dict[str, MeasuredFile]:
    """Return the files of a folder with these digests. They are read later."""
    return {name: MeasuredFile(folder / name, digest) for name, digest in digests.items()}


def measure(files: Collection[MeasuredFile], progress: Progress = silent) -> None:
    """Read files to their ends, several at a time. Raises DigestMismatch if one of them is not what was recorded."""
    left = [file for file in files if not file.is_read]
    count = ByteCount("bytes verified", sum(file.unread_bytes for file in left), progress)

    def read(file: MeasuredFile) -> list[Job]:
        file.read_to(file.size, count.add)
        return []

    run_jobs((partial(read, file) for file in left), count)


def _read_into(buffer: memoryview, file: RawIOBase) -> int:
    """Fill the buffer; less only at the end of the file."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


def _joined(blocks: Iterable[int], size: int) -> int:
    """Return the CRC of consecutive blocks of so many bytes in all from the CRC of each."""
    from awscrt.checksums import combine_crc64nvme

    whole = 0
    for start, crc in zip(range(0, size, BLOCK_BYTES), blocks, strict=True):
        whole = combine_crc64nvme(whole, crc, min(BLOCK_BYTES, size - start))
    return whole


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

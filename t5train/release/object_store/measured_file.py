"""Files that are published, and what is known of their content before they are sent.

A file's sha256 and its CRC are computed from the same bytes in one pass. So an object with this CRC is the certified
file, although S3 knows no sha256 of an object that was uploaded in parts.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import NoReturn

from t5train.errors import DigestMismatch
from t5train.files.os_errors import naming
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, verify_file
from t5train.release.object_store.checksums import crc_of, joined, read_exactly
from t5train.release.object_store.transfers import ByteCount, Job, run_jobs

BLOCK_BYTES = 1 << 20


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

    def take(self, content: bytes) -> None:
        """Take all of the file from memory. Raises DigestMismatch if that is not what was recorded."""
        self._sha256, self._blocks, self._at = hashlib.sha256(), [], 0
        for start in range(0, len(content), BLOCK_BYTES):
            self._add(memoryview(content)[start : start + BLOCK_BYTES])
        self._finish()

    def crc_of(self, start: int, size: int) -> int:
        """Return the CRC that a part had when it was read.

        A part that does not begin with a block is read again. Journals of earlier versions may have such parts.
        """
        if start % BLOCK_BYTES or ((start + size) % BLOCK_BYTES and start + size != self.size):
            return crc_of(read_exactly(self.path, start, size))
        first = start // BLOCK_BYTES
        blocks = self._blocks[first : first - (-size // BLOCK_BYTES)]
        return joined(zip(blocks, _sizes(size), strict=True))

    def _add(self, block: memoryview) -> None:
        self._sha256.update(block)
        self._blocks.append(crc_of(block))
        self._at += len(block)

    def _finish(self) -> None:
        if FileDigest(size=self._at, sha256=self._sha256.hexdigest()) != self.digest:
            self._refuse()
        self._crc = joined(zip(self._blocks, _sizes(self.size), strict=True))

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


def _sizes(size: int) -> Iterator[int]:
    """Sizes of the blocks of so many bytes."""
    return (min(BLOCK_BYTES, size - start) for start in range(0, size, BLOCK_BYTES))

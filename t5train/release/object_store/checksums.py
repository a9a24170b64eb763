"""CRC64NVME, the checksum of whole objects that S3 servers compute, compare and return.

A file's sha256 and its CRC are computed from the same bytes in one pass. So an object with this CRC is the certified
file, although S3 knows no sha256 of an object that was uploaded in parts.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

from t5train.files.os_errors import naming
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest
from t5train.release.object_store.transfers import ByteCount, Job, run_jobs

BLOCK_BYTES = 1 << 20


class MeasuredFile(NamedTuple):
    """Size and both checksums of a file."""

    digest: FileDigest
    crc: int
    blocks: tuple[int, ...] = ()
    """The CRC of each block of ``BLOCK_BYTES``."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.digest.size


def measure(folder: Path, names: Iterable[str], progress: Progress = silent) -> Mapping[str, MeasuredFile]:
    """Return size, sha256 and CRC of the regular files among these; others are left out. Reads several at a time."""
    paths = {name: folder / name for name in names if (folder / name).is_file()}
    count = ByteCount("bytes verified", sum(path.stat().st_size for path in paths.values()), progress)
    measured: dict[str, MeasuredFile] = {}

    def add(name: str) -> list[Job]:
        measured[name] = _measured(paths[name], count)
        return []

    run_jobs((partial(add, name) for name in paths), count)
    return {name: measured[name] for name in paths}


def _measured(path: Path, count: ByteCount) -> MeasuredFile:
    sha256, size, blocks = hashlib.sha256(), 0, []
    with naming(path), open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while filled := _read_into(buffer, file):
            sha256.update(buffer[:filled])
            blocks.append(crc_of(buffer[:filled]))
            size += filled
            count.add(filled)
    whole = joined(zip(blocks, _sizes(size), strict=True))
    return MeasuredFile(FileDigest(size=size, sha256=sha256.hexdigest()), whole, tuple(blocks))


def _read_into(buffer: memoryview, file: RawIOBase) -> int:
    """Fill the buffer; less only at the end of the file."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


def _sizes(size: int) -> Iterator[int]:
    """Sizes of the blocks of so many bytes."""
    return (min(BLOCK_BYTES, size - start) for start in range(0, size, BLOCK_BYTES))


def crc_of_part(path: Path, file: MeasuredFile, start: int, size: int) -> int:
    """Return the CRC that a part of a file had when the file was measured.

    A part that does not begin with a block is read. Journals of earlier versions may have such parts.
    """
    if start % BLOCK_BYTES or ((start + size) % BLOCK_BYTES and start + size != file.size):
        return crc_of(read_exactly(path, start, size))
    first = start // BLOCK_BYTES
    blocks = file.blocks[first : first - (-size // BLOCK_BYTES)]
    return joined(zip(blocks, _sizes(size), strict=True))


def crc_of(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC of data in memory, which follow what has the CRC ``before``."""
    from awscrt.checksums import crc64nvme

    return int(crc64nvme(data, before))


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC of consecutive parts of a file from the CRC and size of each."""
    from awscrt.checksums import combine_crc64nvme

    whole = 0
    for crc, size in parts:
        whole = combine_crc64nvme(whole, crc, size)
    return whole


def encoded(crc: int) -> str:
    """Return a CRC as it is in S3's headers."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def read_exactly(path: Path, start: int, size: int) -> bytes:
    """Read a part of a file; less than ``size`` bytes if the file ends before."""
    with naming(path), open(path, "rb", buffering=0) as file:
        parts, at = [], start
        while at < start + size and (part := os.pread(file.fileno(), start + size - at, at)):
            parts.append(part)
            at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)

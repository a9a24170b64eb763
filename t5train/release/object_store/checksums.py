"""CRC64NVME, the checksum of whole objects that S3 servers compute, compare and return.

A file's sha256 and its CRC are computed from the same bytes in one pass. So an object with this CRC is the certified
file, although S3 knows no sha256 of an object that was uploaded in parts.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from t5train.files.os_errors import naming
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest

_CHUNK_BYTES = 1 << 20


class MeasuredFile(NamedTuple):
    """Size and both checksums of a file."""

    digest: FileDigest
    crc: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.digest.size


def measure(folder: Path, names: Iterable[str], progress: Progress = silent) -> Mapping[str, MeasuredFile]:
    """Return size, sha256 and CRC of the regular files among these; others are left out."""
    paths = {name: folder / name for name in names if (folder / name).is_file()}
    total, done, measured = sum(path.stat().st_size for path in paths.values()), 0, {}
    for name, path in paths.items():
        measured[name] = _measured(path)
        done += measured[name].size
        progress("bytes verified", done, total)
    return measured


def _measured(path: Path) -> MeasuredFile:
    from awscrt.checksums import crc64nvme

    sha256, crc, size = hashlib.sha256(), 0, 0
    with naming(path), open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            sha256.update(buffer[:count])
            crc = crc64nvme(buffer[:count], crc)
            size += count
    return MeasuredFile(FileDigest(size=size, sha256=sha256.hexdigest()), crc)


def crc_of(data: bytes) -> int:
    """Return the CRC of data in memory."""
    from awscrt.checksums import crc64nvme

    return int(crc64nvme(data))


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

"""CRC64NVME, the checksum of whole objects that S3 servers compute, compare and return."""

import base64
import os
from collections.abc import Iterable
from pathlib import Path

from t5train.files.os_errors import naming


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

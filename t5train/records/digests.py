"""Digests of files.

The sha256 of a whole file can only be computed sequentially, on one core. The digest of a safetensors file is instead
computed from its tensors' digests, so that each byte is hashed once and all cores are used. Such a file consists of the
length of its header (8 bytes, little-endian), the header (JSON) and the tensors' bytes without gaps.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from t5train.errors import DigestMismatch
from t5train.files.os_errors import naming
from t5train.files.presence import ABSENT, reading
from t5train.host_resources import num_cores
from t5train.quantities import quantity

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100 << 20  # the limit of safetensors itself
_CHUNK_BYTES = 1 << 20  # per thread; there are as many threads as cores


class SafetensorsDigest(BaseModel):
    """Size in bytes of a safetensors file, and the sha256 of its pieces' concatenated sha256s (32 bytes each).

    The pieces are the header, including its length, and each tensor, in file order. Together they cover all bytes of
    the file. The header's digest fixes the tensors' positions, so two files have the same digest only if they are
    equal, as with a sha256 of the whole file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = Field(ge=0)
    pieces_sha256: str = Field(pattern="^[0-9a-f]{64}$")

    def __str__(self) -> str:
        return f"sha256 of pieces {self.pieces_sha256}"

    @classmethod
    def joined(cls, size: int, pieces: Iterable[bytes]) -> Self:
        """The digest of a file of this size whose pieces have these sha256s."""
        return cls(size=size, pieces_sha256=hashlib.sha256(b"".join(pieces)).hexdigest())


def digest_piece(data: bytes) -> bytes:
    """The sha256 of a piece in memory."""
    return hashlib.sha256(data).digest()


def digest_safetensors(path: Path) -> SafetensorsDigest:
    """Compute the digest of a file, hashing its pieces on all cores. A file with a damaged header is one piece."""
    size = path.stat().st_size
    with naming(path), open(path, "rb") as file:
        ends = list(accumulate(_piece_sizes(file, size), initial=0))
    with ThreadPoolExecutor(num_cores()) as threads:
        pieces = threads.map(partial(_digest_span, path), *zip(*pairwise(ends), strict=True))
        return SafetensorsDigest.joined(size, pieces)


def digest_safetensors_stream(file: IO[bytes], report: Callable[[int], None]) -> SafetensorsDigest:
    """The digest of a seekable stream, read in order; ``report`` is called with the number of bytes read so far."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    sizes, pieces = _piece_sizes(file, size), []
    file.seek(0)
    for piece_size in sizes:
        digest, left = hashlib.sha256(), piece_size
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
            report(file.tell())
        pieces.append(digest.digest())
    return SafetensorsDigest.joined(size, pieces)


def _piece_sizes(file: IO[bytes], size: int) -> list[int]:
    """Bytes of the header and of each tensor; the whole file is one piece if the header does not account for it."""
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > min(size, _MOST_HEADER_BYTES):
            return [size]
        entries = json.loads(file.read(length))
        spans = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        sizes = [_LENGTH.size + length, *(end - start for start, end in spans)]
        gapless = all(before[1] == after[0] for before, after in pairwise([[0, 0], *spans]))
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return [size]
    whole = all(isinstance(piece, int) and piece >= 0 for piece in sizes)
    return sizes if whole and gapless and sum(sizes) == size else [size]


def _digest_span(path: Path, start: int, end: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_CHUNK_BYTES, end - start)))
    with naming(path), open(path, "rb", buffering=0) as file:
        while start < end and (count := os.preadv(file.fileno(), [buffer[: end - start]], start)):
            digest.update(buffer[:count])
            start += count
    return digest.digest()


class FileDigest(BaseModel):
    """Size in bytes and sha256 of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    def __str__(self) -> str:
        return f"sha256 {self.sha256}"


class FileStamp(NamedTuple):
    """What changes when a file is written or replaced."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the present stamp of a file. Raises OSError if it cannot be looked at."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def verify_file(
    path: Path, expected: FileDigest | SafetensorsDigest, advance: Callable[[int], object] = lambda _size: None
) -> None:
    """Compare a file with its recorded size and digest. For ``advance``, see ``digest_file``.

    Raises DigestMismatch if it is missing or differs, and Unreadable if it cannot be read now.
    """
    try:
        with reading(path):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise DigestMismatch(
                    f"{path} is not a file, but a file of {quantity(expected.size, 'byte')} was recorded: restore it"
                )
            if found.st_size != expected.size:
                raise DigestMismatch(
                    f"{path} has {quantity(found.st_size, 'byte')}, but {expected.size:,} were recorded: restore it or "
                    "make it again"
                )
            digest = digest_file(path, advance) if isinstance(expected, FileDigest) else digest_safetensors(path)
    except ABSENT:
        raise DigestMismatch(
            f"{path} is missing; {quantity(expected.size, 'byte')} should be there: restore it or make it again"
        ) from None
    if digest != expected:
        raise DigestMismatch(f"{path} has {digest}, but {expected} was recorded: restore it or make it again")


def digest_file(path: Path, advance: Callable[[int], object] = lambda _size: None) -> FileDigest:
    """Size and sha256 of a file, read once in bounded memory. ``advance`` gets the size of each part that was read."""
    digest, size = hashlib.sha256(), 0
    with naming(path), open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            advance(count)
    return FileDigest(size=size, sha256=digest.hexdigest())


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Digests of some files of a folder, by name."""
    return {name: digest_file(folder / name) for name in names}

"""Part of a file as the body of a request, read while it is sent. It must be what was measured before."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from t5train.errors import DigestMismatch
from t5train.files.os_errors import naming
from t5train.release.object_store.checksums import crc_of

_PIECE_BYTES = 256 << 10  # stays in a core's cache: a whole part in memory takes twice the CPU time


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

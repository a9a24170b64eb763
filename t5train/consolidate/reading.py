"""Reads spans of planned sources from the files of a checkpoint."""

import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from t5train.consolidate.plan import Extent, Source
from t5train.errors import IncompleteCheckpoint
from t5train.presence import reading

_PIECE_BYTES = 1 << 20
_MOST_OPEN = 16  # files: each of many threads has a reader, and a checkpoint may be of thousands of ranks


class Reader:
    """Open files, read by position, by one thread. A context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, IO[bytes]] = {}

    def read(self, source: Source, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the source's bytes from ``start`` on."""
        filled = 0
        for extent in source.span(start, len(buffer)):
            self.read_extent(extent, buffer[filled : filled + extent.size])
            filled += extent.size

    def read_extent(self, extent: Extent, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of an extent. Raises IncompleteCheckpoint when the file is shorter."""
        descriptor, done = self._descriptor(extent.file), 0
        while done < extent.size:
            with reading(extent.file):
                count = os.preadv(descriptor, [buffer[done:]], extent.offset + done)
            if not count:
                raise IncompleteCheckpoint(f"{extent.file} ends at byte {extent.offset + done}: it was truncated")
            done += count

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            with reading(path):
                file = self._open[path] = path.open("rb", buffering=0)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[path].fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()


def repeated_element(source: Source) -> bytes | None:
    """The element that all elements of a source are equal to; None when they differ, or there are none."""
    buffer = memoryview(bytearray(min(_PIECE_BYTES, source.size)))
    with Reader() as reader:
        reader.read(source, 0, buffer[: source.item_bytes])
        element = bytes(buffer[: source.item_bytes])
        repeated = element * (len(buffer) // source.item_bytes)
        for start in range(0, source.size, _PIECE_BYTES):
            piece = buffer[: source.size - start]
            reader.read(source, start, piece)
            if piece != repeated[: len(piece)]:
                return None
    return element or None

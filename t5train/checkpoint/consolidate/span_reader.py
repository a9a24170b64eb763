"""Read byte ranges of checkpoint files, and check the CRC-32 of every record in torch's archives."""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from isal.isal_zlib import crc32, crc32_combine

from t5train.checkpoint.consolidate.plan import Extent, Source
from t5train.checkpoint.consolidate.torch_file import record_checksums
from t5train.errors import IncompleteCheckpoint
from t5train.files.presence import reading

_PIECE_BYTES = 1 << 20
_MOST_OPEN = 16  # files: each thread has a reader, and a checkpoint may have files of thousands of ranks


class Reader:
    """Reads files by position, for one thread, and keeps some of them open. A context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, IO[bytes]] = {}

    def read(self, source: Source, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the source's bytes, starting at byte ``start``."""
        filled = 0
        for extent in source.span(start, len(buffer)):
            self.read_extent(extent, buffer[filled : filled + extent.size])
            filled += extent.size

    def read_extent(self, extent: Extent, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of an extent. Raises IncompleteCheckpoint if the file is too short."""
        descriptor, done = self._descriptor(extent.file), 0
        while done < extent.size:
            with reading(extent.file):
                count = os.preadv(descriptor, [buffer[done:]], extent.offset + done)
            if not count:
                raise IncompleteCheckpoint(
                    f"{extent.file} ends at byte {extent.offset + done}, so it was truncated. Choose another tag"
                )
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
    """The bytes of the element if all elements of a source are equal; None if they differ or there are none."""
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


_GAP_BYTES = 1 << 20


@dataclass
class _Run:
    """Consecutive bytes of a file that have been read, and their CRC-32."""

    file: Path
    start: int
    end: int
    checksum: int


class PassedBytes:
    """The checksums of the bytes that were read for one tensor, in order."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []

    def add(self, source: Source, start: int, data: memoryview) -> None:
        """Add ``data``, the source's bytes starting at byte ``start``."""
        filled = 0
        for extent in source.span(start, len(data)):
            self._add_extent(extent, data[filled : filled + extent.size])
            filled += extent.size

    def _add_extent(self, extent: Extent, data: memoryview) -> None:
        if not self.runs or (self.runs[-1].file, self.runs[-1].end) != (extent.file, extent.offset):
            self.runs.append(_Run(extent.file, extent.offset, extent.offset, 0))
        run = self.runs[-1]
        run.checksum = crc32(data, run.checksum)
        run.end += extent.size


def require_intact(passed: Iterable[PassedBytes]) -> None:
    """Raise IncompleteCheckpoint if a record that was read does not have the CRC-32 that its archive records.

    Records may have been read in any order. Their unread bytes, such as padding, are read now for the checksum.
    """
    files: dict[Path, list[_Run]] = defaultdict(list)
    for tensor in passed:
        for run in tensor.runs:
            files[run.file].append(run)
    with Reader() as reader:
        for file, runs in files.items():
            _require_intact_file(file, sorted(runs, key=lambda run: run.start), reader)


def _require_intact_file(file: Path, runs: list[_Run], reader: Reader) -> None:
    records = sorted(record_checksums(file).items())
    offsets = [offset for offset, _ in records]
    for index, inside in groupby(runs, key=lambda run: bisect_right(offsets, run.start) - 1):
        offset, (size, expected) = records[index]
        found = _checksum(Extent(file, offset, size), inside, reader)
        if found != expected:
            raise IncompleteCheckpoint(
                f"{file} is damaged: the data at byte {offset} has the CRC-32 checksum {found:08x}, but {expected:08x} "
                "was recorded. Choose another tag"
            )


def _checksum(record: Extent, runs: Iterable[_Run], reader: Reader) -> int:
    checksum, position = 0, record.offset
    for run in runs:
        if run.start >= position:  # otherwise these bytes were read before
            checksum = _with_gap(checksum, Extent(record.file, position, run.start - position), reader)
            checksum = crc32_combine(checksum, run.checksum, run.end - run.start)
            position = run.end
    return _with_gap(checksum, Extent(record.file, position, record.offset + record.size - position), reader)


def _with_gap(checksum: int, gap: Extent, reader: Reader) -> int:
    for start in range(0, gap.size, _GAP_BYTES):
        data = memoryview(bytearray(min(_GAP_BYTES, gap.size - start)))
        reader.read_extent(Extent(gap.file, gap.offset + start, len(data)), data)
        checksum = crc32(data, checksum)
    return checksum

"""The CRC-32 that torch's archives carry of every record, checked for files without recorded digests."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from isal.isal_zlib import crc32 as crc32_of  # zlib's, twenty times as fast

from t5train.consolidate import crc32
from t5train.consolidate.metadata import record_checksums
from t5train.consolidate.plan import Extent, Source
from t5train.consolidate.reading import Reader
from t5train.errors import IncompleteCheckpoint

_GAP_BYTES = 1 << 20


@dataclass
class _Run:
    """Bytes of a file that passed, and their CRC-32."""

    file: Path
    start: int
    end: int
    checksum: int


class PassedBytes:
    """The checksums of bytes of one tensor, which pass from the first to the last."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []

    def add(self, source: Source, start: int, data: memoryview) -> None:
        """Take in ``data``, the source's bytes from ``start`` on."""
        filled = 0
        for extent in source.span(start, len(data)):
            self._add_extent(extent, data[filled : filled + extent.size])
            filled += extent.size

    def _add_extent(self, extent: Extent, data: memoryview) -> None:
        if not self.runs or (self.runs[-1].file, self.runs[-1].end) != (extent.file, extent.offset):
            self.runs.append(_Run(extent.file, extent.offset, extent.offset, 0))
        run = self.runs[-1]
        run.checksum = crc32_of(data, run.checksum)
        run.end += extent.size


def require_intact(passed: Iterable[PassedBytes]) -> None:
    """IncompleteCheckpoint when a record of which bytes passed has another CRC-32 than its archive says.

    The bytes passed in any order; those that did not, such as padding, are read for the sum's sake.
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
                f"{file} is damaged: its record at byte {offset} has the CRC-32 {found:08x}, "
                f"the archive's directory says {expected:08x}; choose another tag"
            )


def _checksum(record: Extent, runs: Iterable[_Run], reader: Reader) -> int:
    checksum, position = 0, record.offset
    for run in runs:
        if run.start >= position:  # else it passed twice
            checksum = _with_gap(checksum, Extent(record.file, position, run.start - position), reader)
            checksum = crc32.joined(checksum, run.checksum, run.end - run.start)
            position = run.end
    return _with_gap(checksum, Extent(record.file, position, record.offset + record.size - position), reader)


def _with_gap(checksum: int, gap: Extent, reader: Reader) -> int:
    for start in range(0, gap.size, _GAP_BYTES):
        data = memoryview(bytearray(min(_GAP_BYTES, gap.size - start)))
        reader.read_extent(Extent(gap.file, gap.offset + start, len(data)), data)
        checksum = crc32_of(data, checksum)
    return checksum

"""What is proved of the bytes while they are copied."""

import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from t5train.consolidate.metadata import TORCH_DTYPES, record_checksums
from t5train.consolidate.plan import ITEM_BYTES, Extent, Source, TensorPlan
from t5train.consolidate.reading import Reader
from t5train.errors import IncompleteCheckpoint

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAP_BYTES = 1 << 20
_PIECE = 30_000  # elements: just below where torch starts threads, which only get in the way of the hashing ones


def require_copies(tensor: TensorPlan, start: int, data: memoryview, reader: Reader) -> None:
    """The masters in ``data`` (from byte ``start`` of the source on) round to what the engine computed with.

    It is the one check that needs no live engine and no record: a partition of another step, another run or
    another place does not pass it. Raises IncompleteCheckpoint that names the files.
    """
    item = ITEM_BYTES[tensor.source.dtype]
    masters = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype])
    for copy in tensor.copies:
        width = ITEM_BYTES[copy.dtype]
        stored = memoryview(bytearray(len(data) // item * width))
        reader.read(copy, start // item * width, stored)
        if not _rounds_to(masters, torch.frombuffer(stored, dtype=TORCH_DTYPES[copy.dtype])):
            raise IncompleteCheckpoint(_contradiction(tensor, start, len(data), copy))


def _rounds_to(masters: torch.Tensor, weights: torch.Tensor) -> bool:
    bits = _BITS[weights.element_size()]
    pieces = (slice(start, start + _PIECE) for start in range(0, len(masters), _PIECE))
    return all(torch.equal(masters[piece].to(weights.dtype).view(bits), weights[piece].view(bits)) for piece in pieces)


def _contradiction(tensor: TensorPlan, start: int, size: int, copy: Source) -> str:
    masters = sorted({extent.file.name for extent in tensor.source.span(start, size)})
    weights = sorted({str(extent.file) for extent in copy.extents})
    return (
        f"{tensor.name}: the master in {', '.join(masters)}, rounded to {copy.dtype}, is not the weight in "
        f"{', '.join(weights)}: the files are damaged or of different steps; choose another tag"
    )


@dataclass
class _Record:
    """One record of an archive while it passes: the CRC-32 of its bytes before ``position``."""

    end: int
    expected: int
    position: int
    checksum: int = 0


class RecordChecksums:
    """Checks the CRC-32 that torch's archives carry of every record, for files without recorded digests.

    A record that is read in order is summed as it passes; only its gaps (padding) are read for the sum's sake.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._files: dict[Path, tuple[list[int], list[_Record]]] = {}

    def passed(self, source: Source, start: int, data: memoryview) -> None:
        """Take in ``data``, the source's bytes from ``start`` on."""
        filled = 0
        for extent in source.span(start, len(data)):
            self._extent_passed(extent, data[filled : filled + extent.size])
            filled += extent.size

    def _extent_passed(self, extent: Extent, data: memoryview) -> None:
        record = self._record(extent)
        self._skip_to(extent.file, record, extent.offset)
        if record.position == extent.offset:
            record.checksum = zlib.crc32(data, record.checksum)
            record.position += extent.size

    def require_intact(self) -> None:
        """IncompleteCheckpoint when a record that was read from has another CRC-32 than the archive says."""
        for file, (offsets, records) in self._files.items():
            for offset, record in zip(offsets, records, strict=True):
                if record.position == offset:
                    continue
                self._skip_to(file, record, record.end)
                if record.checksum != record.expected:
                    raise IncompleteCheckpoint(
                        f"{file} is damaged: its record at byte {offset} has the CRC-32 {record.checksum:08x}, "
                        f"the archive's directory says {record.expected:08x}; choose another tag"
                    )

    def _skip_to(self, file: Path, record: _Record, position: int) -> None:
        while record.position < position:
            size = min(_GAP_BYTES, position - record.position)
            gap = memoryview(bytearray(size))
            self._reader.read_extent(Extent(file, record.position, size), gap)
            record.checksum = zlib.crc32(gap, record.checksum)
            record.position += size

    def _record(self, extent: Extent) -> _Record:
        if extent.file not in self._files:
            found = sorted(record_checksums(extent.file).items())
            records = [_Record(offset + size, checksum, offset) for offset, (size, checksum) in found]
            self._files[extent.file] = ([offset for offset, _ in found], records)
        offsets, records = self._files[extent.file]
        return records[bisect_right(offsets, extent.offset) - 1]

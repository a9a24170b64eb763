"""Reads spans of planned sources from the files of a checkpoint."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from t5train.consolidate.plan import Extent, Source
from t5train.errors import IncompleteCheckpoint


class Reader:
    """Open files, read by position. A context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._stack = ExitStack()

    def read(self, source: Source, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the source's bytes from ``start`` on."""
        filled = 0
        for extent in source.span(start, len(buffer)):
            self.read_extent(extent, buffer[filled : filled + extent.size])
            filled += extent.size

    def read_extent(self, extent: Extent, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of an extent; IncompleteCheckpoint when the file ends before it."""
        descriptor, done = self._descriptor(extent.file), 0
        while done < extent.size:
            count = os.preadv(descriptor, [buffer[done:]], extent.offset + done)
            if not count:
                raise IncompleteCheckpoint(f"{extent.file} ends at byte {extent.offset + done}: it was truncated")
            done += count

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            opened = self._stack.enter_context(file.open("rb", buffering=0))
            self._open[file] = opened.fileno()
            os.posix_fadvise(self._open[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

"""A safetensors file while its tensors are written, several at once and in any order."""

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from t5train.consolidate.plan import TensorPlan
from t5train.consolidate.safetensors_format import header
from t5train.safetensors_digest import SafetensorsDigest, digest_piece

_WRITE_BACK_BYTES = 8 << 20


class ShardFile:
    """A new file of its full size, on disk when the context is left. What is written where is the caller's affair."""

    def __init__(self, path: Path, tensors: Sequence[TensorPlan]) -> None:
        self._tensors, self._header = tensors, header(tensors)
        ends = list(accumulate((tensor.size for tensor in tensors), initial=len(self._header)))
        self.size, self._starts = ends[-1], dict(zip((tensor.name for tensor in tensors), ends, strict=False))
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed when the context is left

    def place(self, tensor: TensorPlan) -> "Place":
        """Where the bytes of a tensor go."""
        return Place(self._file.fileno(), self._starts[tensor.name])

    def digest(self, tensors: Mapping[str, bytes]) -> SafetensorsDigest:
        """The digest of the finished file, from the sha256s of its tensors by name."""
        pieces = (tensors[tensor.name] for tensor in self._tensors)
        return SafetensorsDigest.joined(self.size, [digest_piece(self._header), *pieces])

    def __enter__(self) -> Self:
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.size)
            Place(self._file.fileno(), 0).write(memoryview(self._header))
        except BaseException:  # the context was not entered, so that nobody else closes the file
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                os.fsync(self._file.fileno())


class Place:
    """Takes the bytes of one tensor in order, and has them written to disk while the next ones are made.

    Linux begins to write back dirty pages of which it is told that they will not be needed, and forgets clean ones.
    Each stretch is told of twice: when it was written, and when the next one was, by which time it is mostly clean.
    So there is little left to wait for at the end, and the result does not push all else out of memory.
    """

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._before, self._begun, self._end = descriptor, start, start, start

    def write(self, data: memoryview) -> None:
        """Write the next bytes."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self._end + done)
        self._end += done
        if self._end - self._begun >= _WRITE_BACK_BYTES:
            self.write_back()

    def write_back(self) -> None:
        """Have what was written so far go to disk, without waiting for it."""
        os.posix_fadvise(self._descriptor, self._before, self._end - self._before, os.POSIX_FADV_DONTNEED)
        self._before, self._begun = self._begun, self._end

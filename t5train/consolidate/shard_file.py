"""A safetensors file while its tensors are written, several at once and in any order."""

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from t5train.consolidate.plan import TensorPlan
from t5train.consolidate.safetensors_format import BLOCK_BYTES, header
from t5train.safetensors_digest import SafetensorsDigest, digest_piece


class ShardFile:
    """A new file of its full size, on disk when the context is left. A context manager."""

    def __init__(self, path: Path, tensors: Sequence[TensorPlan]) -> None:
        self._path, self._tensors, self._header = path, tensors, header(tensors)
        ends = list(accumulate((tensor.size for tensor in tensors), initial=len(self._header)))
        self._size, self._starts = ends[-1], dict(zip((tensor.name for tensor in tensors), ends, strict=False))
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._cached = stack.enter_context(open(self._path, "xb", buffering=0)).fileno()
            os.posix_fallocate(self._cached, 0, self._size)
            os.pwrite(self._cached, self._header, 0)
            self._direct = _opened_directly(self._path, stack)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            if error is None:
                os.fsync(self._cached)

    def place(self, tensor: TensorPlan) -> "Place":
        """Where the bytes of a tensor go, while the context lasts."""
        return Place(self._cached, self._direct, self._starts[tensor.name])

    def digest(self, tensors: Mapping[str, bytes]) -> SafetensorsDigest:
        """The digest of the finished file, from the sha256s of its tensors by name."""
        pieces = (tensors[tensor.name] for tensor in self._tensors)
        return SafetensorsDigest.joined(self._size, [digest_piece(self._header), *pieces])


class Place:
    """Takes the bytes of one tensor in order.

    They go to the disk at once, past the page cache, as the result has to be there anyway before it is believed: that
    saves a copy and the wait for all of it at the end, and pushes nothing else out of memory. Only whole blocks can:
    the ends of a tensor that shares its block with another one, and whatever a file system refuses, take the usual way.
    """

    def __init__(self, cached: int, direct: int | None, start: int) -> None:
        self._cached, self._direct, self.position = cached, direct, start

    def write(self, data: memoryview) -> None:
        """Write the next bytes; those that fill blocks best lie in memory as in the file, modulo BLOCK_BYTES."""
        head = min(-self.position % BLOCK_BYTES, len(data))
        body = (len(data) - head) // BLOCK_BYTES * BLOCK_BYTES
        self._write_cached(data[:head])
        written = self._write_directly(data[head : head + body])
        self._write_cached(data[head + written :])

    def _write_directly(self, blocks: memoryview) -> int:
        """How many bytes could be written so."""
        if self._direct is None or not blocks:
            return 0
        try:
            count = os.pwrite(self._direct, blocks, self.position)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says that it lies or is cut in a way that does not suit the disk
                raise
            return 0
        self.position += count
        return count

    def _write_cached(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._cached, data[done:], self.position + done)
        self.position += done


def _opened_directly(path: Path, stack: ExitStack) -> int | None:
    """A descriptor that writes past the page cache; None on a file system that knows of no such thing."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    stack.callback(os.close, descriptor)
    return descriptor

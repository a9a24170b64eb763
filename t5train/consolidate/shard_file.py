"""A safetensors file while its tensors are written, several at once and in any order."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

from t5train.consolidate.plan import TensorPlan
from t5train.consolidate.safetensors_format import BLOCK_BYTES, header
from t5train.os_errors import naming
from t5train.safetensors_digest import SafetensorsDigest, digest_piece


class ShardFile:
    """A new file of its full size. It is open only where a tensor is being written: a model may have thousands."""

    def __init__(self, path: Path, tensors: Sequence[TensorPlan]) -> None:
        self._path, self._tensors, self._header = path, tensors, header(tensors)
        ends = list(accumulate((tensor.size for tensor in tensors), initial=len(self._header)))
        self._size, self._starts = ends[-1], dict(zip((tensor.name for tensor in tensors), ends, strict=False))
        with naming(self._path), open(self._path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, self._size)
            file.write(self._header)

    @contextmanager
    def place(self, tensor: TensorPlan) -> Iterator["Place"]:
        """Where the bytes of a tensor go."""
        with open(self._path, "r+b", buffering=0) as cached, ExitStack() as stack:
            yield Place(self._path, cached.fileno(), _opened_directly(self._path, stack), self._starts[tensor.name])

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        with naming(self._path), open(self._path, "r+b", buffering=0) as file:
            os.fsync(file.fileno())

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

    def __init__(self, path: Path, cached: int, direct: int | None, start: int) -> None:
        self._path = path
        self._cached, self._direct, self.position = cached, direct, start

    def write(self, data: memoryview) -> None:
        """Write the next bytes; those that fill blocks best lie in memory as in the file, modulo BLOCK_BYTES."""
        head = min(-self.position % BLOCK_BYTES, len(data))
        body = (len(data) - head) // BLOCK_BYTES * BLOCK_BYTES
        with naming(self._path):
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

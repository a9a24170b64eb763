"""Write safetensors files, several tensors at once and in any order, and split a model into several files.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON, here padded with spaces so that
the first tensor begins at a disk block) and the tensors' bytes in the header's order, without gaps. Large models are
split into several files with an index, as Hugging Face does.
"""

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

from t5train.checkpoint.consolidate.plan import ITEM_BYTES, TensorPlan
from t5train.files.os_errors import naming
from t5train.records.digests import SafetensorsDigest, digest_piece

BLOCK_BYTES = 4096
_LENGTH = struct.Struct("<Q")


def index_name(stem: str) -> str:
    """Name of the index of a model that is split into several files."""
    return f"{stem}.safetensors.index.json"


def header(tensors: Sequence[TensorPlan]) -> bytes:
    """The bytes before the first tensor: the header and its length."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(_LENGTH.size + len(text)) % BLOCK_BYTES)
    return _LENGTH.pack(len(text)) + text


def shards(tensors: Sequence[TensorPlan], stem: str, shard_bytes: int | None) -> dict[str, list[TensorPlan]]:
    """The tensors of each file: one file, or as many as are needed for at most ``shard_bytes`` each.

    A tensor is never split, so one larger than ``shard_bytes`` gets a file of its own. In a file, wider types come
    first: after a few one-byte elements, an fp32 tensor would be misaligned and could not be read.
    """
    cut: list[list[TensorPlan]] = [[]]
    filled = 0
    for tensor in tensors:
        if shard_bytes is not None and cut[-1] and filled + tensor.size > shard_bytes:
            cut.append([])
            filled = 0
        cut[-1].append(tensor)
        filled += tensor.size
    for part in cut:
        part.sort(key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    if len(cut) == 1:
        return {f"{stem}.safetensors": cut[0]}
    return {f"{stem}-{number:05d}-of-{len(cut):05d}.safetensors": part for number, part in enumerate(cut, start=1)}


def index(files: Mapping[str, Sequence[TensorPlan]]) -> dict[str, object]:
    """The content of the index: which file holds which tensor."""
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.size for tensors in files.values() for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


class ShardFile:
    """A new file of its full size. It is open only while a tensor is written: a model may have thousands of files."""

    def __init__(self, path: Path, tensors: Sequence[TensorPlan]) -> None:
        self._path, self._tensors, self._header = path, tensors, header(tensors)
        ends = list(accumulate((tensor.size for tensor in tensors), initial=len(self._header)))
        self._size, self._starts = ends[-1], dict(zip((tensor.name for tensor in tensors), ends, strict=False))
        with naming(self._path), open(self._path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, self._size)
            file.write(self._header)

    @contextmanager
    def place(self, tensor: TensorPlan) -> Iterator["Place"]:
        """Open the file for writing the bytes of a tensor."""
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
    """Writes the bytes of one tensor in order.

    Bytes go directly to the disk, past the page cache, as they must be on disk anyway before the result is valid. This
    saves a copy and a long wait at the end, and evicts nothing else from memory. Only whole blocks can be written this
    way. The ends of a tensor that share a block with another tensor, and writes that the file system refuses, go
    through the page cache.
    """

    def __init__(self, path: Path, cached: int, direct: int | None, start: int) -> None:
        self._path = path
        self._cached, self._direct, self.position = cached, direct, start

    def write(self, data: memoryview) -> None:
        """Write the next bytes. For direct writes, memory and file must have the same alignment, modulo BLOCK_BYTES."""
        head = min(-self.position % BLOCK_BYTES, len(data))
        body = (len(data) - head) // BLOCK_BYTES * BLOCK_BYTES
        with naming(self._path):
            self._write_cached(data[:head])
            written = self._write_directly(data[head : head + body])
            self._write_cached(data[head + written :])

    def _write_directly(self, blocks: memoryview) -> int:
        """Write past the page cache, and return the number of bytes written."""
        if self._direct is None or not blocks:
            return 0
        try:
            count = os.pwrite(self._direct, blocks, self.position)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the disk does not support this alignment or size
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
    """A descriptor that writes past the page cache; None on a file system that does not support it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    stack.callback(os.close, descriptor)
    return descriptor

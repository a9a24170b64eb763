"""Write tensors into safetensors files, in parallel and in bounded memory, checking and hashing them on the way.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON, here padded with spaces so that
the first tensor begins at a disk block) and the tensors' bytes in the header's order, without gaps. Large models are
split into several files with an index, as Hugging Face does.

A thread does all work on a piece of a tensor while the piece is in its core's cache. It also checks that every master
rounds to the value that the engine computed with.
"""

import errno
import hashlib
import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from t5train.checkpoint.consolidate.plan import ITEM_BYTES, Source, TensorPlan
from t5train.checkpoint.consolidate.span_reader import PassedBytes, Reader, require_intact
from t5train.checkpoint.consolidate.torch_file import TORCH_DTYPES
from t5train.errors import IncompleteCheckpoint
from t5train.files.atomic import write_json
from t5train.files.os_errors import naming
from t5train.host_resources import num_cores
from t5train.progress import Progress
from t5train.records.digests import FileDigest, SafetensorsDigest, digest_file, digest_piece

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


_PIECE = 30_000  # elements: with more, torch starts threads, which would compete with those of other tensors


class RoundingCheck:
    """Checks that masters round to the stored weights, in one thread. Its two buffers are reused.

    The check needs neither a live engine nor a record. It detects a partition of another step, run or position.
    """

    def __init__(self, reader: Reader, most_bytes: int) -> None:
        self._reader = reader
        widest = max(ITEM_BYTES.values())  # bytes per element of a copy, if the source has one byte per element
        self._stored, self._rounded = (torch.empty(widest * most_bytes, dtype=torch.uint8) for _ in range(2))

    def require_copies(self, tensor: TensorPlan, start: int, data: memoryview) -> None:
        """Raise IncompleteCheckpoint unless ``data``, the source's bytes from byte ``start``, rounds to every copy."""
        masters = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype])
        for copy in tensor.copies:
            size = ITEM_BYTES[copy.dtype] * len(masters)
            stored, rounded = self._stored[:size].numpy(), self._rounded[:size]
            self._reader.read(copy, start // masters.element_size() * ITEM_BYTES[copy.dtype], stored.data)
            _round(masters, rounded.view(TORCH_DTYPES[copy.dtype]))
            bits = f"u{ITEM_BYTES[copy.dtype]}"
            if not np.array_equal(stored.view(bits), rounded.numpy().view(bits)):
                raise IncompleteCheckpoint(_contradiction(tensor, start, len(data), copy))


def _round(masters: torch.Tensor, rounded: torch.Tensor) -> None:
    for start in range(0, len(masters), _PIECE):
        rounded[start : start + _PIECE].copy_(masters[start : start + _PIECE])


def _contradiction(tensor: TensorPlan, start: int, size: int, copy: Source) -> str:
    masters = sorted({extent.file.name for extent in tensor.source.span(start, size)})
    weights = sorted({str(extent.file) for extent in copy.extents})
    return (
        f"the files of {tensor.name} are damaged or from different steps: the fp32 master in {', '.join(masters)}, "
        f"rounded to {copy.dtype}, differs from the weight in {', '.join(weights)}. Choose another tag"
    )


_PIECE_BYTES = 1 << 20  # small enough that a piece stays in the processor's cache while it is processed


class Copier:
    """Copies tensors one after the other, in one thread; ``advance`` is called with the number of bytes written."""

    def __init__(self, reader: Reader, advance: Callable[[int], None]) -> None:
        self._reader, self._advance = reader, advance
        self._buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        self._rounding = RoundingCheck(reader, _PIECE_BYTES)

    def copy(self, tensor: TensorPlan, place: Place, passed: PassedBytes | None) -> bytes:
        """Write the tensor's bytes at ``place``, and return their sha256.

        The checksums of the bytes that were read are added to ``passed``, unless it is None.

        Raises IncompleteCheckpoint if a file is too short, or if an fp32 master, rounded to 16 bits, differs from the
        weight in the model states.
        """
        digest, start = hashlib.sha256(), 0
        while start < tensor.source.size:
            shift = place.position % BLOCK_BYTES  # makes all later pieces begin and end at a block boundary
            data = self._buffer[shift : min(_PIECE_BYTES, shift + tensor.source.size - start)]
            self._reader.read(tensor.source, start, data)
            self._rounding.require_copies(tensor, start, data)
            if passed is not None:
                passed.add(tensor.source, start, data)
            written = _converted(data, tensor, start)
            digest.update(written)
            place.write(written)
            self._advance(len(written))
            start += len(data)
        return digest.digest()


def _converted(data: memoryview, tensor: TensorPlan, start: int) -> memoryview:
    """Convert the numbers, from byte ``start`` of the source, to those of the result.

    The type of the result represents them exactly unless they are float64. An adapter is added, if there is one.
    """
    if tensor.source.dtype == tensor.dtype and tensor.merging is None:
        return data
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype]).to(TORCH_DTYPES[tensor.dtype])
    if tensor.merging is not None:
        values = tensor.merging.merged(values, start // tensor.source.item_bytes)
    return values.numpy().view(np.uint8).data


_THREADS_PER_CORE = 2  # one computes while another waits for the disk
_MOST_THREADS = 32
_TELL_SECONDS = 0.5


def write_tensors(
    tensors: Sequence[TensorPlan],
    folder: Path,
    stem: str,
    shard_bytes: int | None,
    *,
    has_digests: bool,
    progress: Progress,
) -> dict[str, FileDigest | SafetensorsDigest]:
    """Write tensors into ``folder``, and return the digests of the files written, all of which are then on disk.

    The files are ``{stem}.safetensors``, or several files and their index if ``shard_bytes`` requires it, and
    ``{stem}.tensors.json`` with the sha256 of each tensor. ``has_digests`` says that the checkpoint's files are already
    verified; if they are not, the CRC-32 of each record is checked. Raises IncompleteCheckpoint if a master does not
    round to the engine's copy of it, or if a file is damaged.
    """
    parts = shards(tensors, stem, shard_bytes)
    files = {name: ShardFile(folder / name, part) for name, part in parts.items()}
    jobs = [(tensor, files[name]) for name, part in parts.items() for tensor in part]
    stream = _Stream(jobs, None if has_digests else [], progress)
    stream.run()
    for file in files.values():
        file.sync()
    digests: dict[str, FileDigest | SafetensorsDigest] = {
        name: file.digest(stream.digests) for name, file in files.items()
    }
    documents: dict[str, object] = {f"{stem}.tensors.json": _described(tensors, stream.digests)}
    if len(parts) > 1:
        documents[index_name(stem)] = index(parts)
    for name, document in documents.items():
        write_json(folder / name, document)
        digests[name] = digest_file(folder / name)
    return digests


def _described(tensors: Sequence[TensorPlan], digests: dict[str, bytes]) -> dict[str, object]:
    return {
        tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": digests[tensor.name].hex()}
        for tensor in tensors
    }


_Job = tuple[TensorPlan, ShardFile]


class _Stream:
    """Copies tensors in several threads, the largest first, so that no thread ends with a long one.

    ``digests`` collects the sha256 of each tensor, by name.
    """

    def __init__(self, jobs: Sequence[_Job], passed: list[PassedBytes] | None, progress: Progress) -> None:
        self.digests: dict[str, bytes] = {}
        self._jobs = deque(sorted(jobs, key=lambda job: -job[0].size))
        self._passed, self._progress = passed, progress
        self._total, self._done, self._lock = sum(tensor.size for tensor, _ in jobs), 0, Lock()

    def run(self) -> None:
        """Copy everything. An exception in a thread is raised here, after all threads have stopped."""
        num_threads = min(_THREADS_PER_CORE * num_cores(), _MOST_THREADS)
        with ThreadPoolExecutor(num_threads) as threads:
            running = {threads.submit(self._work) for _ in range(num_threads)}
            try:
                while running:
                    done, running = wait(running, timeout=_TELL_SECONDS, return_when=FIRST_EXCEPTION)
                    for thread in done:
                        thread.result()
                    self._progress("weight bytes written", self._done, self._total)
            finally:
                with self._lock:  # otherwise a thread could see a job and fail to pop it
                    self._jobs.clear()
        if self._passed is not None:
            require_intact(self._passed)

    def _work(self) -> None:
        with Reader() as reader:
            copier = Copier(reader, self._advance)
            while job := self._next():
                passed = None if self._passed is None else PassedBytes()
                tensor, file = job
                with file.place(tensor) as place:
                    self.digests[tensor.name] = copier.copy(tensor, place, passed)
                if self._passed is not None and passed is not None:
                    self._passed.append(passed)

    def _next(self) -> _Job | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs else None

    def _advance(self, size: int) -> None:
        with self._lock:
            self._done += size

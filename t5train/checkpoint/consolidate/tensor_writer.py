"""Copy tensors into safetensors files in parallel and in bounded memory, checking and hashing them on the way.

A thread does all work on a piece of a tensor while the piece is in its core's cache. It also checks that every master
rounds to the value that the engine computed with.
"""

import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from t5train.checkpoint.consolidate.plan import ITEM_BYTES, Source, TensorPlan
from t5train.checkpoint.consolidate.safetensors_files import BLOCK_BYTES, Place, ShardFile, index, index_name, shards
from t5train.checkpoint.consolidate.span_reader import PassedBytes, Reader, require_intact
from t5train.checkpoint.consolidate.torch_file import TORCH_DTYPES
from t5train.errors import IncompleteCheckpoint
from t5train.files.atomic import write_json
from t5train.host_resources import num_cores
from t5train.progress import Progress
from t5train.records.digests import FileDigest, SafetensorsDigest, digest_file

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
            written = data if tensor.source.dtype == tensor.dtype else _cast(data, tensor)
            digest.update(written)
            place.write(written)
            self._advance(len(written))
            start += len(data)
        return digest.digest()


def _cast(data: memoryview, tensor: TensorPlan) -> memoryview:
    """Convert the numbers to the type of the result, which represents them exactly unless they are float64."""
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype]).to(TORCH_DTYPES[tensor.dtype])
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
    jobs = [_Job(tensor, files[name]) for name, part in parts.items() for tensor in part]
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


@dataclass(frozen=True)
class _Job:
    tensor: TensorPlan
    file: ShardFile


class _Stream:
    """Copies tensors in several threads, the largest first, so that no thread ends with a long one.

    ``digests`` collects the sha256 of each tensor, by name.
    """

    def __init__(self, jobs: Sequence[_Job], passed: list[PassedBytes] | None, progress: Progress) -> None:
        self.digests: dict[str, bytes] = {}
        self._jobs = deque(sorted(jobs, key=lambda job: -job.tensor.size))
        self._passed, self._progress = passed, progress
        self._total, self._done, self._lock = sum(job.tensor.size for job in jobs), 0, Lock()

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
                with job.file.place(job.tensor) as place:
                    self.digests[job.tensor.name] = copier.copy(job.tensor, place, passed)
                if self._passed is not None and passed is not None:
                    self._passed.append(passed)

    def _next(self) -> _Job | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs else None

    def _advance(self, size: int) -> None:
        with self._lock:
            self._done += size

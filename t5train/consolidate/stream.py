"""Copies planned tensors into safetensors files: in bounded memory, hashed and checked as they pass."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from t5train.atomic import write_json
from t5train.consolidate.checks import RecordChecksums, require_copies
from t5train.consolidate.hashing import BUFFER_BYTES, HashingBuffers
from t5train.consolidate.metadata import TORCH_DTYPES
from t5train.consolidate.plan import Plan, TensorPlan
from t5train.consolidate.reading import Reader
from t5train.consolidate.safetensors_format import INDEX, header, index, shards
from t5train.progress import Progress
from t5train.records import FileDigest, digest_file

TENSORS = "tensors.json"


def write_weights(
    plan: Plan, folder: Path, shard_bytes: int | None, *, has_digests: bool, progress: Progress
) -> dict[str, FileDigest]:
    """Write the plan's tensors into ``folder``, and ``tensors.json`` with the sha256 of each; digests of the files.

    With ``has_digests`` the checkpoint's files were verified already; else the CRC-32 of each record is checked.
    Raises IncompleteCheckpoint when a master contradicts the engine's own copy of it, or a file is damaged.
    """
    parts = shards(plan.tensors, shard_bytes)
    with Reader() as reader:
        stream = _Stream(reader, None if has_digests else RecordChecksums(reader), plan.size, progress)
        files = {name: stream.write(folder / name, part) for name, part in parts.items()}
        if stream.checksums is not None:
            stream.checksums.require_intact()
    documents: dict[str, object] = {TENSORS: _described(plan.tensors, stream.tensor_digests)}
    if len(parts) > 1:
        documents[INDEX] = index(parts)
    for name, document in documents.items():
        write_json(folder / name, document)
        files[name] = digest_file(folder / name)
    return files


def _described(tensors: Sequence[TensorPlan], digests: dict[str, str]) -> dict[str, object]:
    return {
        tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": digests[tensor.name]}
        for tensor in tensors
    }


class _Stream:
    """Copying from one reader into one file after the other; ``tensor_digests`` fills with each tensor's sha256."""

    def __init__(self, reader: Reader, checksums: RecordChecksums | None, total: int, progress: Progress) -> None:
        self.checksums = checksums
        self.tensor_digests: dict[str, str] = {}
        self._reader, self._total, self._progress = reader, total, progress
        self._done = 0

    def write(self, path: Path, tensors: Sequence[TensorPlan]) -> FileDigest:
        """One safetensors file, on disk when this returns."""
        head = header(tensors)
        size = len(head) + sum(tensor.size for tensor in tensors)
        whole, each = hashlib.sha256(head), {tensor.name: hashlib.sha256() for tensor in tensors}
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(head)
            with HashingBuffers(num_digests=2) as buffers:
                for tensor in tensors:
                    for buffer, data in self._converted(tensor, buffers):
                        buffers.hash(buffer, data, [whole, each[tensor.name]])
                        self._put(file, data)
            file.flush()
            os.fsync(file.fileno())
        self.tensor_digests |= {name: digest.hexdigest() for name, digest in each.items()}
        return FileDigest(size=size, sha256=whole.hexdigest())

    def _converted(self, tensor: TensorPlan, buffers: HashingBuffers) -> Iterator[tuple[memoryview, memoryview]]:
        """A tensor's bytes in the type they are written in, piece by piece, each with the buffer it was read into."""
        for start in range(0, tensor.source.size, BUFFER_BYTES):
            buffer = buffers.take()
            data = buffer[: min(BUFFER_BYTES, tensor.source.size - start)]
            self._reader.read(tensor.source, start, data, self.checksums)
            require_copies(tensor, start, data, self._reader)
            yield buffer, data if tensor.source.dtype == tensor.dtype else _cast(data, tensor)

    def _put(self, file: IO[bytes], data: memoryview) -> None:
        file.write(data)
        self._done += len(data)
        self._progress("weight bytes written", self._done, self._total)


def _cast(data: memoryview, tensor: TensorPlan) -> memoryview:
    """The same numbers in the type of the result, which holds every number of the source's type but float64's."""
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype]).to(TORCH_DTYPES[tensor.dtype])
    return values.numpy().view(np.uint8).data

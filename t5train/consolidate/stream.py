"""Copies planned tensors into safetensors files: in bounded memory, hashed and checked as they pass."""

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch

from t5train.atomic import write_json
from t5train.consolidate.buffers import BUFFER_BYTES, SharedBuffers
from t5train.consolidate.checks import RecordChecksums, require_copies
from t5train.consolidate.metadata import TORCH_DTYPES
from t5train.consolidate.plan import Plan, TensorPlan
from t5train.consolidate.reading import Reader
from t5train.consolidate.safetensors_format import INDEX, header, index, shards
from t5train.progress import Progress
from t5train.records import FileDigest, digest_file

TENSORS = "tensors.json"
_TELL_BYTES = 128 << 20


class Digest(Protocol):
    """A running hash, such as hashlib's."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""
        ...


def write_weights(
    plan: Plan, folder: Path, shard_bytes: int | None, *, has_digests: bool, progress: Progress
) -> dict[str, FileDigest]:
    """Write the plan's tensors into ``folder``, and ``tensors.json`` with the sha256 of each; digests of the files.

    With ``has_digests`` the checkpoint's files were verified already; else the CRC-32 of each record is checked.
    Raises IncompleteCheckpoint when a master contradicts the engine's own copy of it, or a file is damaged.
    """
    parts = shards(plan.tensors, shard_bytes)
    with Reader() as reader, Reader() as checking_reader:
        checks = _Checks(checking_reader, None if has_digests else RecordChecksums(checking_reader))
        stream = _Stream(reader, checks, plan.size, progress)
        files = {name: stream.write(folder / name, part) for name, part in parts.items()}
        checks.finish()
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


class _Checks:
    """What every piece that was read must pass, with a reader of its own: it runs in another thread."""

    def __init__(self, reader: Reader, checksums: RecordChecksums | None) -> None:
        self._reader, self._checksums = reader, checksums

    def check(self, tensor: TensorPlan, start: int, data: memoryview) -> None:
        """One piece: ``data`` from byte ``start`` of the tensor's source on."""
        require_copies(tensor, start, data, self._reader)
        if self._checksums is not None:
            self._checksums.passed(tensor.source, start, data)

    def finish(self) -> None:
        """What can be told only when everything was read."""
        if self._checksums is not None:
            self._checksums.require_intact()


class _Stream:
    """Copying into one file after the other; ``tensor_digests`` fills with the sha256 of each tensor."""

    def __init__(self, reader: Reader, checks: _Checks, total: int, progress: Progress) -> None:
        self.tensor_digests: dict[str, str] = {}
        self._reader, self._checks, self._total, self._progress = reader, checks, total, progress
        self._done = 0

    def write(self, path: Path, tensors: Sequence[TensorPlan]) -> FileDigest:
        """One safetensors file, on disk when this returns."""
        head = header(tensors)
        size = len(head) + sum(tensor.size for tensor in tensors)
        whole, each = hashlib.sha256(head), {tensor.name: hashlib.sha256() for tensor in tensors}
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(head)
            with SharedBuffers(num_readers=3) as buffers:
                for tensor in tensors:
                    self._copy(tensor, file, buffers, [whole, each[tensor.name]])
            file.flush()
            os.fsync(file.fileno())
        self.tensor_digests |= {name: digest.hexdigest() for name, digest in each.items()}
        return FileDigest(size=size, sha256=whole.hexdigest())

    def _copy(self, tensor: TensorPlan, file: IO[bytes], buffers: SharedBuffers, digests: Sequence[Digest]) -> None:
        for start in range(0, tensor.source.size, BUFFER_BYTES):
            buffer = buffers.take()
            data = buffer[: min(BUFFER_BYTES, tensor.source.size - start)]
            self._reader.read(tensor.source, start, data)
            written = data if tensor.source.dtype == tensor.dtype else _cast(data, tensor)
            hashing = [partial(digest.update, written) for digest in digests]
            buffers.share(buffer, [*hashing, partial(self._checks.check, tensor, start, data)])
            file.write(written)
            self._tell(len(written))

    def _tell(self, size: int) -> None:
        before, self._done = self._done, self._done + size
        if before // _TELL_BYTES != self._done // _TELL_BYTES or self._done == self._total:
            self._progress("weight bytes written", self._done, self._total)


def _cast(data: memoryview, tensor: TensorPlan) -> memoryview:
    """The same numbers in the type of the result, which holds every number of the source's type but float64's."""
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype]).to(TORCH_DTYPES[tensor.dtype])
    return values.numpy().view(np.uint8).data

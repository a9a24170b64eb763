"""Copies tensors from the files of a checkpoint to their place: read, checked, hashed and written piece by piece."""

import hashlib
import mmap
from collections.abc import Callable

import numpy as np
import torch

from t5train.consolidate.metadata import TORCH_DTYPES
from t5train.consolidate.plan import TensorPlan
from t5train.consolidate.reading import Reader
from t5train.consolidate.record_checksums import PassedBytes
from t5train.consolidate.rounding import RoundingCheck
from t5train.consolidate.safetensors_format import BLOCK_BYTES
from t5train.consolidate.shard_file import Place

_PIECE_BYTES = 1 << 20  # all that is done with a piece is done while it is in the processor's cache


class Copier:
    """What one thread needs to copy one tensor after the other; ``advance`` learns of bytes written."""

    def __init__(self, reader: Reader, advance: Callable[[int], None]) -> None:
        self._reader, self._advance = reader, advance
        self._buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        self._rounding = RoundingCheck(reader, _PIECE_BYTES)

    def copy(self, tensor: TensorPlan, place: Place, passed: PassedBytes | None) -> bytes:
        """The sha256 of the tensor's bytes, after they were written; ``passed`` takes in what was read.

        Raises IncompleteCheckpoint when a master contradicts the engine's own copy of it, or a file is too short.
        """
        digest, start = hashlib.sha256(), 0
        while start < tensor.source.size:
            shift = place.position % BLOCK_BYTES  # so that all later pieces begin and end with a block
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
    """The same numbers in the type of the result, which holds every number of the source's type but float64's."""
    values = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.source.dtype]).to(TORCH_DTYPES[tensor.dtype])
    return values.numpy().view(np.uint8).data

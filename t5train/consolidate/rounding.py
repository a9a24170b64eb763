"""What is proved of every master while it is copied: that it rounds to what the engine computed with."""

import numpy as np
import torch

from t5train.consolidate.metadata import TORCH_DTYPES
from t5train.consolidate.plan import ITEM_BYTES, Source, TensorPlan
from t5train.consolidate.reading import Reader
from t5train.errors import IncompleteCheckpoint

_PIECE = 30_000  # elements: just below where torch starts threads, which only get in the way of the other tensors'


class RoundingCheck:
    """Compares masters with the weights they round to, in one thread; its two buffers are used again and again.

    It is the one check that needs no live engine and no record: a partition of another step, another run or
    another place does not pass it.
    """

    def __init__(self, reader: Reader, most_bytes: int) -> None:
        self._reader = reader
        widest = max(ITEM_BYTES.values())  # of a copy's elements, where the source's have one byte
        self._stored, self._rounded = (torch.empty(widest * most_bytes, dtype=torch.uint8) for _ in range(2))

    def require_copies(self, tensor: TensorPlan, start: int, data: memoryview) -> None:
        """IncompleteCheckpoint unless ``data``, the source's bytes from ``start`` on, rounds to every copy's."""
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
        f"{tensor.name}: the master in {', '.join(masters)}, rounded to {copy.dtype}, is not the weight in "
        f"{', '.join(weights)}: the files are damaged or of different steps; choose another tag"
    )

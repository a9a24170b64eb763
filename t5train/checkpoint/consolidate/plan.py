"""The plan of which tensors to write, and from which bytes of which files. It is made before any weight is read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from t5train.model.lora import Merging

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Size of an element in bytes, by safetensors' name of its type."""


@dataclass(frozen=True)
class Extent:
    """A contiguous range of bytes in a file."""

    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Source:
    """Where a tensor is stored: byte ranges of files that, joined, are its elements in row-major order."""

    dtype: str
    extents: tuple[Extent, ...]

    @property
    def size(self) -> int:
        """Size of all extents in bytes."""
        return sum(extent.size for extent in self.extents)

    @property
    def item_bytes(self) -> int:
        """Size of an element in bytes."""
        return ITEM_BYTES[self.dtype]

    def span(self, start: int, size: int) -> list[Extent]:
        """The extents that hold ``size`` bytes, starting at byte ``start``."""
        found, position = [], 0
        for extent in self.extents:
            first, last = max(start, position), min(start + size, position + extent.size)
            if first < last:
                found.append(Extent(extent.file, extent.offset + first - position, last - first))
            position += extent.size
        return found


@dataclass(frozen=True)
class Location:
    """Where a parameter or buffer, its fp32 master, or one of its moments is stored.

    ``copies`` store the same values elsewhere, and must be bit-identical.
    """

    shape: tuple[int, ...]
    source: Source
    copies: tuple[Source, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the result.

    ``copies`` are the weights that the engine computed with: the weight itself, and every alias that is stored
    separately. They must be bit-identical to ``source`` rounded to their type. ``merging`` adds an adapter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: Source
    copies: tuple[Source, ...] = ()
    is_parameter: bool = True
    merging: "Merging | None" = None

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Size in bytes in the result."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """Everything to write, in order.

    ``moments`` maps the optimizer's name of a moment, such as ``exp_avg``, to one tensor for each trained parameter.
    ``adapters`` are those that ``tensors`` are merged with.
    """

    tensors: Sequence[TensorPlan]
    step: int
    moments: Mapping[str, Sequence[TensorPlan]] = field(default_factory=dict)
    adapters: Sequence[TensorPlan] = ()

    @property
    def by_stem(self) -> Mapping[str, Sequence[TensorPlan]]:
        """The tensors by the stem of the files that they are written to."""
        adapters = {"adapters": self.adapters} if self.adapters else {}
        return {"model": self.tensors, **adapters, **self.moments}

    @property
    def size(self) -> int:
        """Size of all tensors of the result in bytes, including moments."""
        return sum(tensor.size for tensors in self.by_stem.values() for tensor in tensors)

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters. Tied parameters count once, buffers not at all."""
        return sum(tensor.num_elements for tensor in self.tensors if tensor.is_parameter)

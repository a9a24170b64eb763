"""Parameter groups whose fp32 masters lie end to end in one flat buffer, cut over ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from t5train.consolidate.masters import Master, Partition
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.plan import Source
from t5train.errors import ConsolidationError, UnknownLayout
from t5train.sidecar import ParameterSlot

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class FlatGroup:
    """One parameter group: its partitions in order, and where each parameter lies in all of them joined.

    ``padding`` is how many elements may follow the last parameter.
    """

    index: int
    partitions: Sequence[Partition]
    slots: Sequence[ParameterSlot]
    padding: int

    @property
    def num_elements(self) -> int:
        """Elements of all partitions."""
        return sum(partition.master.num_elements for partition in self.partitions)

    def masters(self) -> dict[str, Master]:
        """Where each parameter's fp32 master lies, after every element of the group was accounted for."""
        self._require_accounted()
        return self._located([partition.master for partition in self.partitions])

    def moments(self, key: str) -> dict[str, Master]:
        """Where the optimizer's tensor ``key`` of each parameter lies: in flat tensors cut as the masters are."""
        return self._located([partition.moment(key, self.padding) for partition in self.partitions])

    def _located(self, tensors: Sequence[StoredTensor]) -> dict[str, Master]:
        for stored in tensors:
            if stored.dtype != "F32":
                raise UnknownLayout(f"{stored.file} keeps parameter group {self.index} in {stored.dtype}, not in fp32")
        joined = Source("F32", tuple(extent for stored in tensors for extent in stored.source().extents))
        return {
            slot.name: Master(slot.shape, Source("F32", tuple(joined.span(4 * slot.offset, 4 * slot.numel))))
            for slot in self.slots
        }

    def _require_accounted(self) -> None:
        """Every element belongs to one parameter, or is padding no longer than DeepSpeed's."""
        where = f"parameter group {self.index}"
        slots = [slot for slot in self.slots if slot.numel]
        for before, after in pairwise(slots):
            gap = after.offset - before.offset - before.numel
            if not 0 <= gap < _ALIGNMENT_BYTES // 2:
                raise ConsolidationError(f"{where}: {gap} elements lie between {before.name} and {after.name}")
        if slots and slots[0].offset:
            raise ConsolidationError(f"{where}: {slots[0].offset} elements lie before {slots[0].name}")
        end = slots[-1].offset + slots[-1].numel if slots else 0
        if not 0 <= self.num_elements - end <= self.padding:
            raise ConsolidationError(
                f"{where}: its parameters take {end} elements, its partitions in {_files(self.partitions)} hold "
                f"{self.num_elements}, and at most {self.padding} may be padding: a partition is of another checkpoint"
            )


def packed_slots(
    shapes: Iterable[tuple[str, tuple[int, ...]]], paddings: Sequence[int] | None = None
) -> list[ParameterSlot]:
    """Slots of named shapes that follow one another, each with its padding behind it (none when left out)."""
    slots, offset = [], 0
    for index, (name, shape) in enumerate(shapes):
        slot = ParameterSlot.of(name, shape, offset)
        slots.append(slot)
        offset += slot.numel + (paddings[index] if paddings else 0)
    return slots


def _files(partitions: Sequence[Partition]) -> str:
    names: dict[Path, None] = dict.fromkeys(partition.master.file for partition in partitions)
    return ", ".join(file.name for file in names)

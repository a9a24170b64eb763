"""The optimizer's half of a checkpoint: an fp32 master for each parameter that it trains.

The masters of a parameter group are concatenated in one flat buffer, which is partitioned over the data-parallel ranks.
Each rank writes its partition to its own file. The moments are stored in the same way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from t5train.checkpoint.consolidate.module_states import ModuleStates
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, progress_of, require_same
from t5train.checkpoint.consolidate.plan import Location, Source
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.errors import ConsolidationError, UnknownLayout
from t5train.model.parameters import ParameterSlot


@dataclass(frozen=True)
class Partition:
    """A flat tensor of masters in a file, and the optimizer's state for it (its moments)."""

    master: StoredTensor
    state: Mapping[str, Any] = field(default_factory=dict)

    def moment(self, key: str, padding: int) -> StoredTensor:
        """The optimizer's tensor ``key`` for the same elements, without the up to ``padding`` elements that may follow.

        Raises UnknownLayout if there is no such tensor, or if its size does not match.
        """
        held, size = self.state.get(key), self.master.num_elements
        if not size:
            return self.master
        if not isinstance(held, StoredTensor):
            raise UnknownLayout(
                f"{self.master.file} holds no {key} (one of Adam's moments) of its fp32 masters, only "
                f"{sorted(map(str, self.state)) or 'nothing'}. Consolidate the checkpoint without moments"
            )
        if held.shape == self.master.shape:
            return held
        if held.strides != (1,) or not size <= held.num_elements <= size + padding:
            raise UnknownLayout(
                f"{self.master.file} holds {key} with the shape {held.shape}, but the fp32 masters have the shape "
                f"{self.master.shape}. Consolidate the checkpoint without moments"
            )
        return replace(held, shape=(size,))


class ParameterGroup(Protocol):
    """A group of masters that are stored together."""

    def masters(self) -> Mapping[str, Location]:
        """The master of each parameter, after checking that every element of the group is accounted for."""
        ...

    def moments(self, key: str) -> Mapping[str, Location]:
        """The optimizer's tensor ``key`` (``"exp_avg"``) of each parameter. Raises UnknownLayout if one is missing."""
        ...


ReadGroups = Callable[[OpenedCheckpoint, ModuleStates], Sequence[ParameterGroup]]
"""Finds the masters of every parameter group, by their names in the result: the other half of a layout's rules."""


_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class FlatGroup:
    """One parameter group: its partitions in order, and each parameter's position in the joined partitions.

    ``padding`` is the maximum number of elements after the last parameter.
    """

    index: int
    partitions: Sequence[Partition]
    slots: Sequence[ParameterSlot]
    padding: int

    @property
    def num_elements(self) -> int:
        """The number of elements in all partitions."""
        return sum(partition.master.num_elements for partition in self.partitions)

    def masters(self) -> dict[str, Location]:
        """Where each parameter's fp32 master is stored, after checking that every element is accounted for."""
        self._require_accounted()
        return self._located([partition.master for partition in self.partitions])

    def moments(self, key: str) -> dict[str, Location]:
        """Where the optimizer's tensor ``key`` of each parameter is stored. It is partitioned like the masters."""
        return self._located([partition.moment(key, self.padding) for partition in self.partitions])

    def _located(self, tensors: Sequence[StoredTensor]) -> dict[str, Location]:
        for stored in tensors:
            if stored.dtype != "F32":
                raise UnknownLayout(
                    f"{stored.file} keeps masters or moments of parameter group {self.index} in {stored.dtype}, but "
                    "only fp32 is supported. Save the checkpoint with fp32 optimizer states"
                )
        joined = Source("F32", tuple(extent for stored in tensors for extent in stored.source().extents))
        return {
            slot.name: Location(slot.shape, Source("F32", tuple(joined.span(4 * slot.offset, 4 * slot.numel))))
            for slot in self.slots
        }

    def _require_accounted(self) -> None:
        """Raise ConsolidationError unless every element belongs to one parameter or to DeepSpeed's padding."""
        where = f"parameter group {self.index}"
        slots = [slot for slot in self.slots if slot.numel]
        for before, after in pairwise(slots):
            gap = after.offset - before.offset - before.numel
            if not 0 <= gap < _ALIGNMENT_BYTES // 2:
                raise ConsolidationError(
                    f"{where}: the recorded positions of parameters are wrong. {after.name} begins {gap} elements "
                    f"after the end of {before.name}, but must begin 0 to {_ALIGNMENT_BYTES // 2 - 1} elements after "
                    "it. Choose another tag"
                )
        if slots and slots[0].offset:
            raise ConsolidationError(
                f"{where}: the recorded positions of parameters are wrong. {slots[0].name} must begin at element 0, "
                f"but begins at {slots[0].offset}. Choose another tag"
            )
        end = slots[-1].offset + slots[-1].numel if slots else 0
        if not 0 <= self.num_elements - end <= self.padding:
            raise ConsolidationError(
                f"{where}: a partition belongs to another checkpoint. The partitions in {_files(self.partitions)} hold "
                f"{self.num_elements} elements, but the parameters need {end}, and at most {self.padding} more can be "
                "padding. Choose another tag"
            )


def packed_slots(
    shapes: Iterable[tuple[str, tuple[int, ...]]], paddings: Sequence[int] | None = None
) -> list[ParameterSlot]:
    """The slots of consecutive parameters, each followed by its padding (none by default)."""
    slots, offset = [], 0
    for index, (name, shape) in enumerate(shapes):
        slot = ParameterSlot.of(name, shape, offset)
        slots.append(slot)
        offset += slot.numel + (paddings[index] if paddings else 0)
    return slots


def _files(partitions: Sequence[Partition]) -> str:
    names: dict[Path, None] = dict.fromkeys(partition.master.file for partition in partitions)
    return ", ".join(file.name for file in names)


@dataclass(frozen=True)
class OptimizerKeys:
    """The keys of a file's flat masters, and of the state of torch's optimizer, which DeepSpeed wraps."""

    masters: str
    inner: str


def read_optimizers(
    checkpoint: OpenedCheckpoint, names: Sequence[str], keys: OptimizerKeys, same: Sequence[str]
) -> list[dict[str, Any]]:
    """The optimizer state in each rank's file.

    Raises IncompleteCheckpoint unless all files agree on DeepSpeed's version, the steps, the learning rates, the number
    of masters and the values of the keys in ``same``.
    """
    states = [_optimizer(checkpoint, name, keys) for name in names]
    versions = {name: checkpoint.read(name) for name in names}
    require_same(checkpoint.folder, versions, ["ds_version"])
    require_same(checkpoint.folder, dict(zip(names, states, strict=True)), same)
    progress = {name: progress_of(state.get(keys.inner)) for name, state in zip(names, states, strict=True)}
    require_same(checkpoint.folder, progress, ["parameter groups", "optimizer steps", "learning rates"])
    lengths = {
        name: {"number of flat masters": len(state[keys.masters])} for name, state in zip(names, states, strict=True)
    }
    require_same(checkpoint.folder, lengths, ["number of flat masters"])
    return states


def partition_of(state: Mapping[str, Any], keys: OptimizerKeys, index: int) -> Partition:
    """One of a rank's flat masters, with the optimizer's state for it."""
    masters = state[keys.masters]
    stored = masters[index]
    if not isinstance(stored, StoredTensor):
        raise UnknownLayout(
            f"the fp32 masters of parameter group {index} are stored as a {type(stored).__name__}, not as a tensor, "
            "which is not supported. Choose another tag"
        )
    return Partition(stored, inner_states(state.get(keys.inner), len(masters))[index])


def inner_states(optimizer: Any, count: int) -> list[Mapping[str, Any]]:
    """The state of each of an optimizer's ``count`` tensors; empty if the state dictionary does not match them."""
    if isinstance(optimizer, list) and len(optimizer) == count:
        return [state if isinstance(state, Mapping) else {} for state in optimizer]
    if not isinstance(optimizer, Mapping) or "state" not in optimizer:
        return [{}] * count
    numbers = [number for group in optimizer.get("param_groups", ()) for number in group.get("params", ())]
    if len(numbers) != count:
        return [{}] * count
    return [optimizer["state"].get(number, {}) for number in numbers]


def _optimizer(checkpoint: OpenedCheckpoint, name: str, keys: OptimizerKeys) -> dict[str, Any]:
    state = checkpoint.read(name).get("optimizer_state_dict")
    if not isinstance(state, dict) or not isinstance(state.get(keys.masters), list):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise UnknownLayout(
            f"{checkpoint.folder / name} holds no fp32 masters where they are expected (a list {keys.masters!r}), only "
            f"{found}. Choose another tag"
        )
    if "ds_zero_partition_groups" in state:
        raise UnknownLayout(
            f"{checkpoint.folder / name} uses AutoEP, which is not supported. Turn this feature of DeepSpeed "
            "off, and save the checkpoint again"
        )
    return state

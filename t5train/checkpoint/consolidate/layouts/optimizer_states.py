"""The optimizer's half of a checkpoint: an fp32 master for each parameter that it trains.

Each data-parallel rank writes a file. In it, the masters of a parameter group lie end to end in one flat buffer, which
is partitioned over the ranks, and so do their moments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from t5train.checkpoint.consolidate.layouts.module_states import ModuleStates
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, progress_of, require_same
from t5train.checkpoint.consolidate.plan import Source
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.errors import ConsolidationError, UnknownLayout
from t5train.model.parameters import ParameterSlot


@dataclass(frozen=True)
class Partition:
    """A flat tensor of masters in a file, and the optimizer's state for it (its moments)."""

    master: StoredTensor
    state: Mapping[str, Any] = field(default_factory=dict)

    def moment(self, key: str, padding: int) -> StoredTensor:
        """The optimizer's tensor ``key`` for the same elements; in the file, up to ``padding`` more may follow.

        Raises UnknownLayout when there is none, or it has another size.
        """
        held, size = self.state.get(key), self.master.num_elements
        if not size:
            return self.master
        if not isinstance(held, StoredTensor):
            raise UnknownLayout(
                f"{self.master.file} holds no {key} of its fp32 masters, but Adam-like optimizers keep it (state "
                f"found: {sorted(map(str, self.state)) or 'nothing'}): consolidate the checkpoint without moments"
            )
        if held.shape == self.master.shape:
            return held
        if held.strides != (1,) or not size <= held.num_elements <= size + padding:
            raise UnknownLayout(
                f"{self.master.file} holds {key} with the shape {held.shape}, but the fp32 masters have the shape "
                f"{self.master.shape}: consolidate the checkpoint without moments"
            )
        return replace(held, shape=(size,))


@dataclass(frozen=True)
class Master:
    """Where a parameter's fp32 master, or one of its moments, lies; ``copies`` must be equal bit for bit."""

    shape: tuple[int, ...]
    source: Source
    copies: tuple[Source, ...] = ()


class ParameterGroup(Protocol):
    """Masters that are stored together, by one rule."""

    def masters(self) -> Mapping[str, Master]:
        """Each parameter's master, after every element of the group was accounted for."""
        ...

    def moments(self, key: str) -> Mapping[str, Master]:
        """The optimizer's tensor ``key`` (``"exp_avg"``) of each parameter; UnknownLayout where there is none."""
        ...


ReadGroups = Callable[[OpenedCheckpoint, ModuleStates], Sequence[ParameterGroup]]
"""The other half of a layout: finds the masters of every parameter group, by the names the result will have."""


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
                raise ConsolidationError(
                    f"{where}: the distance between {before.name} and {after.name} is {gap} elements, but must be at "
                    f"least 0 and below {_ALIGNMENT_BYTES // 2}"
                )
        if slots and slots[0].offset:
            raise ConsolidationError(
                f"{where}: {slots[0].name} must begin at element 0, but begins at {slots[0].offset}"
            )
        end = slots[-1].offset + slots[-1].numel if slots else 0
        if not 0 <= self.num_elements - end <= self.padding:
            raise ConsolidationError(
                f"{where}: the partitions in {_files(self.partitions)} hold {self.num_elements} elements, but the "
                f"parameters need {end}, and at most {self.padding} more can be padding: a partition belongs to "
                "another checkpoint; choose another tag"
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


@dataclass(frozen=True)
class OptimizerKeys:
    """The keys of a file's flat masters, and of the state of the optimizer inside DeepSpeed's."""

    masters: str
    inner: str


def read_optimizers(
    checkpoint: OpenedCheckpoint, names: Sequence[str], keys: OptimizerKeys, same: Sequence[str]
) -> list[dict[str, Any]]:
    """The content of each rank's file; IncompleteCheckpoint unless all have equal steps, rates and ``same`` keys."""
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
            f"the fp32 masters of parameter group {index} must be a tensor, but are a {type(stored).__name__}"
        )
    return Partition(stored, inner_states(state.get(keys.inner), len(masters))[index])


def inner_states(optimizer: Any, count: int) -> list[Mapping[str, Any]]:
    """An optimizer's state for each of ``count`` tensors, from its state dictionary; empty if that is not possible."""
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
        raise UnknownLayout(f"{checkpoint.folder / name} holds no {keys.masters}; it holds {found}")
    if "ds_zero_partition_groups" in state:
        raise UnknownLayout(f"{checkpoint.folder / name} has AutoEP's expert partitions, which are not supported")
    return state

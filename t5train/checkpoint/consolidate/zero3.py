"""ZeRO 3: every parameter is partitioned over the data-parallel ranks separately.

Each rank holds ``ceil(numel / ranks)`` elements of every parameter; those beyond ``numel`` are padding with arbitrary
content. A rank concatenates its parts of a sub-group (a few consecutive parameters of a group) in one flat buffer.

In every file of model states, the module's parameters are empty. Frozen parameters are stored there as fragments,
partitioned in the same way, and buffers are stored in full. There is no second copy of a trained weight, so only the
files' agreement, sizes and checksums can be verified.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate.module_states import (
    ModuleStates,
    buffer_names,
    model_states,
    step_of,
    stored_weights,
    tied_names,
    ties_left_out,
)
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, StateFile, require_same
from t5train.checkpoint.consolidate.optimizer_states import (
    OptimizerKeys,
    Partition,
    packed_slots,
    partition_of,
    read_optimizers,
)
from t5train.checkpoint.consolidate.plan import Extent, Location, Source
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.checkpoint.consolidate.zero012 import require_recorded
from t5train.errors import ConsolidationError, IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot

_KEYS = OptimizerKeys(masters="fp32_flat_groups", inner="optimizer_state_dict")
_SAME_IN_MODEL_STATES = (
    "ds_version", "global_steps", "global_samples", "skipped_steps", "dp_world_size", "param_shapes",
    "frozen_param_shapes", "buffer_names",
)  # fmt: skip
_SAME_IN_OPTIMIZER_STATES = ("partition_count", "dynamic_loss_scale")


def module_states(checkpoint: OpenedCheckpoint) -> ModuleStates:
    """The module states of all ranks: buffers, frozen parameters, and the names of all other parameters."""
    models = _models(checkpoint)
    first = models[0]
    stored = stored_weights(checkpoint, first["module"])
    buffers = buffer_names(checkpoint, first)
    empty = {name for name, weight in stored.items() if name not in buffers and not weight.num_elements}
    kept = {name: weight for name, weight in stored.items() if name not in empty}
    frozen = _frozen(checkpoint, models)
    return ModuleStates(
        weights={name: Location(weight.shape, weight.source()) for name, weight in kept.items()} | frozen,
        buffers=buffers,
        aliases=tied_names(checkpoint, first, kept),
        step=step_of(checkpoint, first),
        without_values=frozenset(empty - frozen.keys() - ties_left_out(checkpoint, first)),
    )


def groups(checkpoint: OpenedCheckpoint, _module: ModuleStates) -> list["PartitionedGroup"]:
    """The sub-groups of a ZeRO 3 optimizer."""
    shapes = _models(checkpoint)[0].get("param_shapes")
    states = _optimizer_states(checkpoint)
    if not isinstance(shapes, list) or any(len(state[_KEYS.masters]) != len(shapes) for state in states):
        counts = [len(state[_KEYS.masters]) for state in states]
        raise UnknownLayout(
            f"{checkpoint.folder}: the files contradict each other. The optimizer states of the ranks hold {counts} "
            "sub-groups (parts of a parameter group), but the model states record the shapes of "
            f"{len(shapes) if isinstance(shapes, list) else 'none'}. Choose another tag"
        )
    found = [
        PartitionedGroup(
            index,
            [partition_of(state, _KEYS, index) for state in states],
            [(checkpoint.result_name(name), tuple(shape)) for name, shape in group.items()],
        )
        for index, group in enumerate(shapes)
    ]
    require_recorded(checkpoint, [[group.slots() for group in found]] * len(states))
    return found


@dataclass(frozen=True)
class PartitionedGroup:
    """One sub-group: each rank's flat buffer, and the parameters in it, each partitioned over all ranks."""

    index: int
    partitions: Sequence[Partition]
    shapes: Sequence[tuple[str, tuple[int, ...]]]

    def slots(self) -> list[ParameterSlot]:
        """The position of each parameter's part in a rank's flat buffer, which is the same on all ranks."""
        paddings = [_part(shape, len(self.partitions)) - math.prod(shape) for _, shape in self.shapes]
        return packed_slots(self.shapes, paddings)

    def masters(self) -> dict[str, Location]:
        """Where each parameter's fp32 master is stored, after checking that every element is accounted for."""
        return self._located([partition.master for partition in self.partitions])

    def moments(self, key: str) -> dict[str, Location]:
        """Where the optimizer's tensor ``key`` of each parameter is stored. It is partitioned like the masters."""
        return self._located([partition.moment(key, padding=0) for partition in self.partitions])

    def _located(self, tensors: Sequence[StoredTensor]) -> dict[str, Location]:
        held = sum(_part(shape, len(tensors)) for _, shape in self.shapes)
        for stored in tensors:
            if stored.dtype != "F32":
                raise UnknownLayout(
                    f"{stored.file} keeps masters or moments of sub-group {self.index} in {stored.dtype}, but only "
                    "fp32 is supported. Save the checkpoint with fp32 optimizer states"
                )
            if stored.num_elements != held:
                raise ConsolidationError(
                    f"{stored.file} belongs to another checkpoint: it holds {stored.num_elements} elements of "
                    f"sub-group {self.index}, but the parameters of that sub-group have {held} on each of "
                    f"{len(tensors)} ranks. Choose another tag"
                )
        sources = [stored.source() for stored in tensors]
        return {slot.name: Location(slot.shape, _joined(sources, slot.shape, slot.offset)) for slot in self.slots()}


def _part(shape: Sequence[int], num_ranks: int) -> int:
    """The number of elements of a parameter that each rank holds, including padding."""
    return -(-math.prod(shape) // num_ranks)


def _joined(sources: Sequence[Source], shape: tuple[int, ...], offset: int) -> Source:
    """Join the ranks' parts of a parameter, without padding. Each part begins at element ``offset``."""
    part, left = _part(shape, len(sources)), math.prod(shape)
    item = sources[0].item_bytes
    extents: list[Extent] = []
    for source in sources:
        taken = min(part, left)
        extents += source.span(item * offset, item * taken)
        left -= taken
    return Source(sources[0].dtype, tuple(extents))


def _models(checkpoint: OpenedCheckpoint) -> list[dict[str, Any]]:
    """The model states of every rank, after checking that they agree."""
    size = int(model_states(checkpoint, checkpoint.first(StateFile.RANK_MODEL)).get("dp_world_size", 0))
    names = checkpoint.files_by_rank(StateFile.RANK_MODEL, size)
    models = [model_states(checkpoint, name) for name in names]
    require_same(checkpoint.folder, dict(zip(names, models, strict=True)), _SAME_IN_MODEL_STATES)
    return models


def _optimizer_states(checkpoint: OpenedCheckpoint) -> list[dict[str, Any]]:
    size = len(_models(checkpoint))
    names = checkpoint.files_by_rank(StateFile.OPTIMIZER, size)
    states = read_optimizers(checkpoint, names, _KEYS, _SAME_IN_OPTIMIZER_STATES)
    if states[0].get("partition_count") != size:
        raise UnknownLayout(
            f"the layout of {checkpoint.folder / names[0]} is not supported: the parameters are partitioned over "
            f"{states[0].get('partition_count')} ranks, but must be partitioned over all {size} data-parallel ranks"
        )
    return states


def _frozen(checkpoint: OpenedCheckpoint, models: Sequence[Mapping[str, Any]]) -> dict[str, Location]:
    """Frozen parameters, from the fragments in every rank's model states."""
    shapes: Mapping[str, Sequence[int]] = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    return {
        checkpoint.result_name(name): _frozen_weight(name, tuple(shape), [held.get(name) for held in fragments])
        for name, shape in shapes.items()
    }


def _frozen_weight(name: str, shape: tuple[int, ...], fragments: Sequence[Any]) -> Location:
    sources = []
    for rank, fragment in enumerate(fragments):
        if not isinstance(fragment, StoredTensor) or fragment.num_elements != _part(shape, len(fragments)):
            raise IncompleteCheckpoint(
                f"the model states of rank {rank} hold no part of the frozen parameter {name}, or one whose size does "
                f"not fit the shape {shape}. Choose another tag"
            )
        sources.append(fragment.source())
    if len(dtypes := {source.dtype for source in sources}) > 1:
        raise IncompleteCheckpoint(
            f"the files contradict each other: the type of the frozen parameter {name} is not the same on all ranks "
            f"({', '.join(sorted(dtypes))}). Choose another tag"
        )
    if dtypes & {"I8", "U8"}:
        raise UnknownLayout(
            f"the frozen parameter {name} is quantized ({dtypes.pop()}), and the files do not hold its "
            "scales. Choose a tag that was saved without zero_quantized_nontrainable_weights"
        )
    return Location(shape, _joined(sources, shape, 0))

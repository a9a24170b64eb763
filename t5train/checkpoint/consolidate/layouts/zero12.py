"""ZeRO 1 and 2: the masters' flat buffers are partitioned over the data-parallel ranks.

This also covers BF16_Optimizer (ZeRO 1 in bf16 with fp32 gradient accumulation) and offload to the CPU, whose files
differ only in padding. Joined in rank order, the partitions without their end padding form the group's flat buffer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from t5train.checkpoint.consolidate.layouts.module_states import MODEL_STATES, ModuleStates, model_states
from t5train.checkpoint.consolidate.layouts.optimizer_states import (
    FlatGroup,
    OptimizerKeys,
    Partition,
    packed_slots,
    partition_of,
    read_optimizers,
)
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, StateFile
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot

_KEYS = OptimizerKeys(masters="single_partition_of_fp32_groups", inner="base_optimizer_state")
_SAME_ON_EVERY_RANK = ("partition_count", "param_alignment_paddings", "dynamic_loss_scale")
ALIGNED_ELEMENTS = 2  # DeepSpeed pads a group to a multiple of twice its number of ranks


def groups(checkpoint: OpenedCheckpoint, _module: ModuleStates) -> list[FlatGroup]:
    """The parameter groups of a ZeRO 1 or 2 optimizer, each partitioned over all data-parallel ranks."""
    model = model_states(checkpoint, MODEL_STATES)
    states = optimizer_states(checkpoint, int(model.get("dp_world_size", 0)))
    slots = [
        [slot.model_copy(update={"name": checkpoint.result_name(slot.name)}) for slot in group]
        for group in stored_slots(checkpoint, model, states[0])
    ]
    require_recorded(checkpoint, [slots] * len(states))
    return flat_groups(checkpoint, states, slots)


def flat_groups(
    checkpoint: OpenedCheckpoint, states: Sequence[Mapping[str, Any]], slots: Sequence[Sequence[ParameterSlot]]
) -> list[FlatGroup]:
    """Return one FlatGroup for each parameter group.

    ``slots`` lists, for each group, which parameter lies where in the flat master. ``states`` has the optimizer
    state of each rank; every group is partitioned over all of them. Raises UnknownLayout if the numbers of
    groups differ.
    """
    _require_dense(checkpoint, states)
    counts = {len(slots), *(len(state[_KEYS.masters]) for state in states)}
    if len(counts) > 1:
        raise UnknownLayout(
            f"{checkpoint.folder}: the files contradict each other. They have different numbers of parameter groups, "
            f"{sorted(counts)}. Choose another tag"
        )
    return [
        FlatGroup(index, [partition(state, index) for state in states], group, ALIGNED_ELEMENTS * len(states))
        for index, group in enumerate(slots)
    ]


def optimizer_states(checkpoint: OpenedCheckpoint, num_ranks: int, stage: int = 0) -> list[dict[str, Any]]:
    """The optimizer state that each data-parallel rank (in a pipeline, of this stage) saved, by rank."""
    if stage:
        names = checkpoint.files_by_rank(StateFile.OTHER_OPTIMIZER, num_ranks, stage)
    else:
        names = checkpoint.files_by_rank(StateFile.OPTIMIZER, num_ranks)
    return read_optimizers(checkpoint, names, _KEYS, _SAME_ON_EVERY_RANK)


def partition(state: Mapping[str, Any], group: int) -> Partition:
    """One rank's part of a parameter group."""
    return partition_of(state, _KEYS, group)


def _require_dense(checkpoint: OpenedCheckpoint, states: Sequence[Mapping[str, Any]]) -> None:
    for rank, state in enumerate(states):
        if "partition_count" not in state or any(count != len(states) for count in state["partition_count"]):
            raise UnknownLayout(
                f"the layout of checkpoint {checkpoint.folder} is not supported: the parameter groups of rank {rank} "
                f"are partitioned over {state.get('partition_count')} ranks, but must be partitioned over all "
                f"{len(states)} data-parallel ranks"
            )


def stored_slots(
    checkpoint: OpenedCheckpoint, model: Mapping[str, Any], state: Mapping[str, Any]
) -> list[list[ParameterSlot]]:
    """The slots of each group, from the shapes that DeepSpeed records, with the names in the files."""
    shapes = model.get("param_shapes")
    if not isinstance(shapes, list) or len(shapes) != len(state[_KEYS.masters]):
        raise UnknownLayout(
            f"{checkpoint.folder}: the positions of the parameters are unknown, because the model states do not record "
            "the shapes (param_shapes) of every parameter group. Choose another tag"
        )
    paddings = state.get("param_alignment_paddings") or [None] * len(shapes)
    counts = [len(padding) for padding in paddings if padding is not None]
    if counts and counts != [len(group) for group in shapes]:
        raise IncompleteCheckpoint(
            f"{checkpoint.folder} mixes files of different checkpoints: the parameter groups have "
            f"{[len(group) for group in shapes]} parameters in the model states, but {counts} in the optimizer states. "
            "Choose another tag"
        )
    return [
        packed_slots(((name, tuple(shape)) for name, shape in group.items()), padding)
        for group, padding in zip(shapes, paddings, strict=True)
    ]


def require_recorded(checkpoint: OpenedCheckpoint, slots: Sequence[Sequence[Sequence[ParameterSlot]]]) -> None:
    """Raise IncompleteCheckpoint if a sidecar's groups differ from those in ``slots`` for its data-parallel rank."""
    for sidecar in checkpoint.sidecars:
        if sidecar.groups != slots[sidecar.layout.data_parallel_rank]:
            raise IncompleteCheckpoint(
                f"{checkpoint.folder}: the sidecar of rank {sidecar.rank} and the model states record different "
                "positions of parameters; choose another tag"
            )

"""ZeRO 0 to 2: the masters of a parameter group are stored in full (ZeRO 0), or as one partition for each rank.

At ZeRO 0, the file of model states also holds the optimizer's state. In fp32, the optimizer updates the module's own
weights and stores only their moments. In bf16 and fp16, it also stores masters: one flat tensor per group
(``fp32_groups_flat``, DeepSpeed's fused Adam) or one tensor per parameter (``fp32_groups``, every other optimizer).
Neither form records the positions of the parameters; the sidecar does.

At ZeRO 1 and 2, the flat buffers are partitioned over the data-parallel ranks. This also covers BF16_Optimizer (ZeRO 1
in bf16 with fp32 gradient accumulation) and offload to the CPU, whose files differ only in padding. Joined in rank
order, the partitions without their end padding form the group's flat buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate.module_states import MODEL_STATES, ModuleStates, model_states
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, StateFile
from t5train.checkpoint.consolidate.optimizer_states import (
    FlatGroup,
    OptimizerKeys,
    ParameterGroup,
    Partition,
    inner_states,
    packed_slots,
    partition_of,
    read_optimizers,
)
from t5train.checkpoint.consolidate.plan import Location
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot


@dataclass(frozen=True)
class InPlaceGroup:
    """Parameters that an optimizer updates in place, in its own order, and its state for each."""

    slots: Sequence[ParameterSlot]
    states: Sequence[Mapping[str, Any]]

    def masters(self) -> dict[str, Location]:
        """Empty: the module's weights are the masters."""
        return {}

    def moments(self, key: str) -> dict[str, Location]:
        """Where the optimizer's tensor ``key`` of each parameter is stored. Raises UnknownLayout if one is missing."""
        return {slot.name: self._moment(slot, state, key) for slot, state in zip(self.slots, self.states, strict=True)}

    def _moment(self, slot: ParameterSlot, state: Mapping[str, Any], key: str) -> Location:
        held = state.get(key)
        if not isinstance(held, StoredTensor) or held.shape != slot.shape or held.dtype != "F32":
            raise UnknownLayout(
                f"the optimizer states hold no {key} (one of Adam's moments) of {slot.name} in fp32 and with the "
                f"parameter's shape, only {sorted(map(str, state)) or 'nothing'}. Consolidate the checkpoint without "
                "moments"
            )
        return Location(held.shape, held.source())


def in_place_groups(optimizer: Any, recorded: Sequence[Sequence[ParameterSlot]]) -> list[InPlaceGroup]:
    """A group of the optimizer's parameters in the order that the sidecar records; none without a sidecar."""
    slots = [slot for group in recorded for slot in group]
    return [InPlaceGroup(slots, inner_states(optimizer, len(slots)))] if slots else []


def replicated_groups(checkpoint: OpenedCheckpoint, module: ModuleStates) -> Sequence[ParameterGroup]:
    """The parameter groups of a ZeRO 0 optimizer; without masters if it updates the module's own weights."""
    optimizer = model_states(checkpoint, MODEL_STATES).get("optimizer")
    held = master_groups(optimizer)
    if not held:
        require_full_precision(checkpoint, module)
        return in_place_groups(optimizer, checkpoint.sidecars[0].groups if checkpoint.sidecars else [])
    layouts = checkpoint.sidecars[0].groups if checkpoint.sidecars else _in_module_order(checkpoint, module, held)
    if len(layouts) != len(held):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the optimizer holds {len(held)} parameter groups, but the sidecar records "
            f"{len(layouts)}; choose another tag"
        )
    return [
        FlatGroup(index, partitions, slots, padding=0)
        for index, (partitions, slots) in enumerate(zip(partition_groups(optimizer), layouts, strict=True))
    ]


def master_groups(optimizer: Any) -> list[Sequence[StoredTensor]]:
    """The masters of each parameter group, as one tensor or several; empty if the optimizer keeps no masters."""
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:
        return [[flat] for flat in optimizer["fp32_groups_flat"]]
    if isinstance(optimizer, dict) and "fp32_groups" in optimizer:
        return list(optimizer["fp32_groups"])
    return []


def partition_groups(optimizer: Any) -> list[list[Partition]]:
    """The masters of each parameter group, with their state in torch's optimizer, which DeepSpeed wraps."""
    held = master_groups(optimizer)
    states = iter(inner_states(optimizer.get("optimizer_state_dict"), sum(map(len, held))) if held else [])
    return [[Partition(master, next(states)) for master in masters] for masters in held]


def require_full_precision(checkpoint: OpenedCheckpoint, module: ModuleStates) -> None:
    """Raise UnknownLayout if a weight that has no separate master is in bf16 or fp16."""
    for name, weight in module.weights.items():
        dtype = weight.source.dtype
        if dtype in {"BF16", "F16"} and name not in module.buffers:
            raise UnknownLayout(
                f"{checkpoint.folder}: {name} is {dtype} and has no fp32 master. Save the checkpoint with an optimizer "
                "that keeps fp32 masters"
            )


def _in_module_order(
    checkpoint: OpenedCheckpoint, module: ModuleStates, groups: Sequence[Sequence[StoredTensor]]
) -> list[list[ParameterSlot]]:
    """The slots in the module's order, the only possible one if a single group holds all parameters.

    Raises UnknownLayout otherwise. The order is verified later against the weights.
    """
    untrained = module.buffers | module.aliases.keys()
    slots = packed_slots((name, weight.shape) for name, weight in module.weights.items() if name not in untrained)
    held = sum(master.num_elements for group in groups for master in group)
    needed = sum(slot.numel for slot in slots)
    if len(groups) != 1 or held != needed:
        raise UnknownLayout(
            f"the positions of the parameters in {checkpoint.folder} cannot be determined. The checkpoint was saved "
            "with ZeRO 0 and has no sidecars, so it must have one parameter group and no frozen parameters. It has "
            f"{len(groups)} parameter groups; their fp32 masters have {held} elements, and the module's parameters "
            f"have {needed}. Load the checkpoint with the program that wrote it, and save it with ZeRO 1"
        )
    return [slots]


_KEYS = OptimizerKeys(masters="single_partition_of_fp32_groups", inner="base_optimizer_state")
_SAME_ON_EVERY_RANK = ("partition_count", "param_alignment_paddings", "dynamic_loss_scale")
ALIGNED_ELEMENTS = 2  # DeepSpeed pads a group to a multiple of twice its number of ranks


def partitioned_groups(checkpoint: OpenedCheckpoint, _module: ModuleStates) -> list[FlatGroup]:
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

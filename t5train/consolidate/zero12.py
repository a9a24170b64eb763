"""ZeRO 1 and 2: the masters' flat buffers are cut over the data-parallel ranks.

Also BF16_Optimizer (ZeRO 1 in bf16 with fp32 gradient accumulation) and offload to the CPU, whose files are the
same but for padding. What each rank's file holds, without its end padding, joins to the group's flat buffer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.dense import model_states
from t5train.consolidate.flat_groups import FlatGroup, packed_slots
from t5train.consolidate.masters import Partition
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.module_states import ModuleStates
from t5train.consolidate.state_files import StateFile
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.sidecar import ParameterSlot

_MASTERS = "single_partition_of_fp32_groups"
_ALIGNED_ELEMENTS = 2  # DeepSpeed pads a group to twice its ranks


def groups(checkpoint: OpenedCheckpoint, _module: ModuleStates) -> list[FlatGroup]:
    """The parameter groups of a ZeRO 1 or 2 optimizer, each cut over all data-parallel ranks."""
    model = model_states(checkpoint)
    states = optimizer_states(checkpoint, int(model.get("dp_world_size", 0)))
    _require_dense(checkpoint, states)
    return [
        FlatGroup(index, [partition(state, index) for state in states], slots, _ALIGNED_ELEMENTS * len(states))
        for index, slots in enumerate(_slots(checkpoint, model, states[0]))
    ]


def optimizer_states(checkpoint: OpenedCheckpoint, num_ranks: int) -> list[dict[str, Any]]:
    """What each data-parallel rank saved of its optimizer, by rank."""
    files = checkpoint.files_by_rank(StateFile.OPTIMIZER, num_ranks)
    states = [_optimizer_state(checkpoint, name) for name in files]
    counts = {len(state[_MASTERS]) for state in states} | {len(state["partition_count"]) for state in states}
    if len(counts) > 1:
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the optimizer states of its ranks hold {sorted(counts)} parameter groups: "
            "they are not of one checkpoint"
        )
    return states


def partition(state: Mapping[str, Any], group: int) -> Partition:
    """One rank's part of a parameter group."""
    stored = state[_MASTERS][group]
    if not isinstance(stored, StoredTensor):
        raise UnknownLayout(f"the masters of parameter group {group} are a {type(stored).__name__}, not a tensor")
    return Partition(stored)


def _optimizer_state(checkpoint: OpenedCheckpoint, name: str) -> dict[str, Any]:
    state = checkpoint.read(name).get("optimizer_state_dict")
    if not isinstance(state, dict) or _MASTERS not in state or "partition_count" not in state:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise UnknownLayout(f"{checkpoint.folder / name} holds no {_MASTERS}; it holds {found}")
    return state


def _require_dense(checkpoint: OpenedCheckpoint, states: Sequence[Mapping[str, Any]]) -> None:
    for rank, state in enumerate(states):
        if any(count != len(states) for count in state["partition_count"]):
            raise UnknownLayout(
                f"{checkpoint.folder}: rank {rank} holds groups cut over {state['partition_count']} ranks: "
                f"dense ones are cut over all {len(states)} data-parallel ranks"
            )


def _slots(
    checkpoint: OpenedCheckpoint, model: Mapping[str, Any], state: Mapping[str, Any]
) -> Sequence[Sequence[ParameterSlot]]:
    """The layout of each group after DeepSpeed's own shapes, which sidecars must confirm where there are any."""
    shapes = model.get("param_shapes")
    if not isinstance(shapes, list) or len(shapes) != len(state[_MASTERS]):
        raise UnknownLayout(f"{checkpoint.folder}: the model states do not hold the shapes of each parameter group")
    paddings = state.get("param_alignment_paddings") or [None] * len(shapes)
    derived = [
        packed_slots(((checkpoint.result_name(name), tuple(shape)) for name, shape in group.items()), padding)
        for group, padding in zip(shapes, paddings, strict=True)
    ]
    if any(sidecar.groups != derived for sidecar in checkpoint.sidecars):
        raise IncompleteCheckpoint(f"{checkpoint.folder}: sidecars and model states differ in where parameters lie")
    return derived

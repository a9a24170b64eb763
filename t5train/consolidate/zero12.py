"""ZeRO 1 and 2: the masters' flat buffers are cut over the data-parallel ranks.

Also BF16_Optimizer (ZeRO 1 in bf16 with fp32 gradient accumulation) and offload to the CPU, whose files are the
same but for padding. What each rank's file holds, without its end padding, joins to the group's flat buffer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from t5train.consolidate.assemble import assemble
from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.flat_groups import FlatGroup, packed_slots
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.plan import Plan
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.sidecar import ParameterSlot

MODEL_STATES = "mp_rank_00_model_states.pt"
_OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MASTERS = "single_partition_of_fp32_groups"
_ALIGNED_ELEMENTS = 2  # DeepSpeed pads a group to twice its ranks


def recognises(names: frozenset[str]) -> bool:
    """One file of model states, and optimizer states of every data-parallel rank."""
    others = names - {MODEL_STATES}
    return MODEL_STATES in names and bool(others) and all(_OPTIMIZER_STATES.fullmatch(name) for name in others)


def plan(checkpoint: OpenedCheckpoint) -> Plan:
    """Where every tensor of a ZeRO 1 or 2 checkpoint lies."""
    model = checkpoint.read(MODEL_STATES)
    states = _optimizer_states(checkpoint, model)
    layouts = _slots(checkpoint, model, states[0])
    groups = [
        FlatGroup(index, [_partition(state, index) for state in states], slots, _ALIGNED_ELEMENTS * len(states))
        for index, slots in enumerate(layouts)
    ]
    return assemble(checkpoint, model, groups)


def _optimizer_states(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each data-parallel rank saved, by rank."""
    files = {int(match[1]): match[0] for name in checkpoint.names if (match := _OPTIMIZER_STATES.fullmatch(name))}
    size = model.get("dp_world_size", 0)
    if sorted(files) != list(range(size)):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder} was written by {size} data-parallel ranks; it holds optimizer states of ranks "
            f"{sorted(files)}, it lacks ranks {sorted(set(range(size)) - set(files))}"
        )
    states = [_optimizer_state(checkpoint, files[rank]) for rank in range(size)]
    num_groups = len(states[0][_MASTERS])
    for rank, state in enumerate(states):
        counts = state["partition_count"]
        if len(state[_MASTERS]) != num_groups or any(count != size for count in counts):
            raise UnknownLayout(
                f"{checkpoint.folder / files[rank]} holds {len(state[_MASTERS])} groups, cut over {counts} ranks: "
                f"dense ones ({num_groups}, as on rank 0) are cut over all {size} data-parallel ranks"
            )
    return states


def _optimizer_state(checkpoint: OpenedCheckpoint, name: str) -> dict[str, Any]:
    state = checkpoint.read(name).get("optimizer_state_dict")
    if not isinstance(state, dict) or _MASTERS not in state or "partition_count" not in state:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise UnknownLayout(f"{checkpoint.folder / name} holds no {_MASTERS}; it holds {found}")
    return state


def _slots(
    checkpoint: OpenedCheckpoint, model: Mapping[str, Any], state: Mapping[str, Any]
) -> Sequence[Sequence[ParameterSlot]]:
    """The layout of each group: of the sidecar where there is one, else after DeepSpeed's own shapes."""
    shapes = model.get("param_shapes")
    if not isinstance(shapes, list) or len(shapes) != len(state[_MASTERS]):
        raise UnknownLayout(f"{checkpoint.folder}: the model states do not hold the shapes of each parameter group")
    paddings = state.get("param_alignment_paddings") or [None] * len(shapes)
    derived = [
        packed_slots(((name, tuple(shape)) for name, shape in group.items()), padding)
        for group, padding in zip(shapes, paddings, strict=True)
    ]
    return _recorded(checkpoint, derived) if checkpoint.sidecars else derived


def _recorded(checkpoint: OpenedCheckpoint, derived: list[list[ParameterSlot]]) -> list[list[ParameterSlot]]:
    recorded, prefix = checkpoint.sidecars[0].groups, checkpoint.sidecars[0].model_prefix
    named = [[slot.model_copy(update={"name": slot.name.removeprefix(prefix)}) for slot in group] for group in derived]
    if any(sidecar.groups != named for sidecar in checkpoint.sidecars):
        raise IncompleteCheckpoint(f"{checkpoint.folder}: sidecars and model states differ in where parameters lie")
    return recorded


def _partition(state: Mapping[str, Any], group: int) -> StoredTensor:
    partition = state[_MASTERS][group]
    if not isinstance(partition, StoredTensor):
        raise UnknownLayout(f"the masters of parameter group {group} are a {type(partition).__name__}, not a tensor")
    return partition

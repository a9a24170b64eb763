"""ZeRO 0: every rank holds all masters, and the file of model states has the optimizer's state too.

In fp32 the module's own weights are what the optimizer moves. In bf16 and fp16 the optimizer keeps the masters:
flat for each group (``fp32_groups_flat``, DeepSpeed's fused Adam) or one tensor a parameter (``fp32_groups``, every
other optimizer). Neither says which parameter lies where; the sidecar does.
"""

from collections.abc import Sequence
from typing import Any

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.dense import MODEL_STATES
from t5train.consolidate.flat_groups import FlatGroup, packed_slots
from t5train.consolidate.in_place import in_place_groups
from t5train.consolidate.masters import ParameterGroup, Partition
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.module_states import ModuleStates, model_states
from t5train.consolidate.optimizer_files import inner_states
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.sidecar import ParameterSlot


def groups(checkpoint: OpenedCheckpoint, module: ModuleStates) -> Sequence[ParameterGroup]:
    """The parameter groups of a ZeRO 0 optimizer; without masters where it moves the module's own weights."""
    optimizer = model_states(checkpoint, MODEL_STATES).get("optimizer")
    held = master_groups(optimizer)
    if not held:
        require_full_precision(checkpoint, module)
        return in_place_groups(optimizer, checkpoint.sidecars[0].groups if checkpoint.sidecars else [])
    layouts = checkpoint.sidecars[0].groups if checkpoint.sidecars else _in_module_order(checkpoint, module, held)
    if len(layouts) != len(held):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the optimizer holds {len(held)} parameter groups, the sidecar {len(layouts)}"
        )
    return [
        FlatGroup(index, partitions, slots, padding=0)
        for index, (partitions, slots) in enumerate(zip(partition_groups(optimizer), layouts, strict=True))
    ]


def master_groups(optimizer: Any) -> list[Sequence[StoredTensor]]:
    """The masters of each parameter group, in one tensor or several; none where the optimizer keeps no masters."""
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:
        return [[flat] for flat in optimizer["fp32_groups_flat"]]
    if isinstance(optimizer, dict) and "fp32_groups" in optimizer:
        return list(optimizer["fp32_groups"])
    return []


def partition_groups(optimizer: Any) -> list[list[Partition]]:
    """The masters of each parameter group with what the optimizer inside DeepSpeed's keeps of them."""
    held = master_groups(optimizer)
    states = iter(inner_states(optimizer.get("optimizer_state_dict"), sum(map(len, held))) if held else [])
    return [[Partition(master, next(states)) for master in masters] for masters in held]


def require_full_precision(checkpoint: OpenedCheckpoint, module: ModuleStates) -> None:
    """UnknownLayout when a weight that should be its own master is of low precision."""
    for name, weight in module.weights.items():
        dtype = weight.source.dtype
        if dtype in {"BF16", "F16"} and name not in module.buffers:
            raise UnknownLayout(f"{checkpoint.folder}: {name} is {dtype}, and no fp32 master is beside it")


def _in_module_order(
    checkpoint: OpenedCheckpoint, module: ModuleStates, groups: Sequence[Sequence[StoredTensor]]
) -> list[list[ParameterSlot]]:
    """The one order a single group can have, if all parameters are in it; the weights must bear it out later."""
    untrained = module.buffers | module.aliases.keys()
    slots = packed_slots((name, weight.shape) for name, weight in module.weights.items() if name not in untrained)
    held = sum(master.num_elements for group in groups for master in group)
    needed = sum(slot.numel for slot in slots)
    if len(groups) != 1 or held != needed:
        raise UnknownLayout(
            f"{checkpoint.folder} is ZeRO 0 without sidecars. Parameter groups: {len(groups)}; elements of their "
            f"masters: {held}, of the module's parameters: {needed}. With several groups or frozen parameters it "
            "cannot be told which lies where: load it with its program and save it with ZeRO 1"
        )
    return [slots]

"""ZeRO 0: every rank holds all masters, and the file of model states also holds the optimizer's state.

In fp32, the optimizer updates the module's own weights and stores only their moments. In bf16 and fp16, it also stores
masters: one flat tensor per group (``fp32_groups_flat``, DeepSpeed's fused Adam) or one tensor per parameter
(``fp32_groups``, every other optimizer). Neither form records the positions of the parameters; the sidecar does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate.layouts.module_states import MODEL_STATES, ModuleStates, model_states
from t5train.checkpoint.consolidate.layouts.optimizer_states import (
    FlatGroup,
    Master,
    ParameterGroup,
    Partition,
    inner_states,
    packed_slots,
)
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot


@dataclass(frozen=True)
class InPlaceGroup:
    """Parameters that an optimizer updates in place, in its own order, and its state for each."""

    slots: Sequence[ParameterSlot]
    states: Sequence[Mapping[str, Any]]

    def masters(self) -> dict[str, Master]:
        """Empty: the module's weights are the masters."""
        return {}

    def moments(self, key: str) -> dict[str, Master]:
        """Where the optimizer's tensor ``key`` of each parameter is stored. Raises UnknownLayout if one is missing."""
        return {slot.name: self._moment(slot, state, key) for slot, state in zip(self.slots, self.states, strict=True)}

    def _moment(self, slot: ParameterSlot, state: Mapping[str, Any], key: str) -> Master:
        held = state.get(key)
        if not isinstance(held, StoredTensor) or held.shape != slot.shape or held.dtype != "F32":
            raise UnknownLayout(
                f"the optimizer states hold no {key} (one of Adam's moments) of {slot.name} in fp32 and with the "
                f"parameter's shape, only {sorted(map(str, state)) or 'nothing'}. Consolidate the checkpoint without "
                "moments"
            )
        return Master(held.shape, held.source())


def in_place_groups(optimizer: Any, recorded: Sequence[Sequence[ParameterSlot]]) -> list[InPlaceGroup]:
    """A group of the optimizer's parameters in the order that the sidecar records; none without a sidecar."""
    slots = [slot for group in recorded for slot in group]
    return [InPlaceGroup(slots, inner_states(optimizer, len(slots)))] if slots else []


def groups(checkpoint: OpenedCheckpoint, module: ModuleStates) -> Sequence[ParameterGroup]:
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

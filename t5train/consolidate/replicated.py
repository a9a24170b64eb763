"""ZeRO 0: every rank holds all of it, and one file says so.

In fp32 the module's own weights are what the optimizer moves. In bf16 and fp16 the optimizer keeps the masters:
flat for each group (``fp32_groups_flat``, DeepSpeed's fused Adam) or one tensor a parameter (``fp32_groups``, every
other optimizer). Neither says which parameter lies where; the sidecar does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from t5train.consolidate.assemble import assemble, module_weights, tied_names
from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.flat_groups import FlatGroup, packed_slots
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.plan import Plan
from t5train.consolidate.zero12 import MODEL_STATES
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.sidecar import ParameterSlot


def recognises(names: frozenset[str]) -> bool:
    """Nothing but one file of model states."""
    return names == {MODEL_STATES}


def plan(checkpoint: OpenedCheckpoint) -> Plan:
    """Where every tensor of a ZeRO 0 checkpoint lies."""
    model = checkpoint.read(MODEL_STATES)
    groups = _master_groups(model.get("optimizer"))
    if not groups:
        _require_full_precision(checkpoint, model)
        return assemble(checkpoint, model, [])
    layouts = checkpoint.sidecars[0].groups if checkpoint.sidecars else _in_module_order(checkpoint, model, groups)
    if len(layouts) != len(groups):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the optimizer holds {len(groups)} parameter groups, the sidecar {len(layouts)}"
        )
    flat = [
        FlatGroup(index, partitions, slots, padding=0)
        for index, (partitions, slots) in enumerate(zip(groups, layouts, strict=True))
    ]
    return assemble(checkpoint, model, flat)


def _master_groups(optimizer: Any) -> list[Sequence[StoredTensor]]:
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:
        return [[flat] for flat in optimizer["fp32_groups_flat"]]
    if isinstance(optimizer, dict) and "fp32_groups" in optimizer:
        return list(optimizer["fp32_groups"])
    return []


def _require_full_precision(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> None:
    buffers = model.get("buffer_names") or ()
    for name, weight in module_weights(checkpoint, model).items():
        if weight.dtype in {"BF16", "F16"} and name not in buffers:
            raise UnknownLayout(f"{checkpoint.folder}: {name} is {weight.dtype}, and no fp32 master is beside it")


def _in_module_order(
    checkpoint: OpenedCheckpoint, model: Mapping[str, Any], groups: Sequence[Sequence[StoredTensor]]
) -> list[list[ParameterSlot]]:
    """The one order a single group can have, if all parameters are in it; the weights must bear it out later."""
    untrained = {*(model.get("buffer_names") or ()), *tied_names(checkpoint, model)}
    weights = module_weights(checkpoint, model)
    slots = packed_slots((name, weight.shape) for name, weight in weights.items() if name not in untrained)
    held = sum(partition.num_elements for group in groups for partition in group)
    if len(groups) != 1 or held != sum(slot.numel for slot in slots):
        raise UnknownLayout(
            f"{checkpoint.folder} is ZeRO 0 with {len(groups)} parameter groups of {held} elements and no sidecars: "
            "which parameter lies where cannot be told; save it with ZeRO 1"
        )
    return [slots]

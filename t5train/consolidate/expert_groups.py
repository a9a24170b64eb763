"""The masters of a mixture of experts, ZeRO 1 and 2: a group of experts is cut over the ranks that hold the same ones.

So one parameter group of the files is as many as there are expert-parallel ranks. All are laid out alike, and only
rank 0's layout is stored, with the experts numbered as rank 0 does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from t5train.consolidate import zero12
from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.dense import MODEL_STATES
from t5train.consolidate.expert_ranks import ExpertRanks, expert_parallel_size
from t5train.consolidate.experts import ExpertName, expert_layers
from t5train.consolidate.flat_groups import FlatGroup
from t5train.consolidate.module_states import ModuleStates, model_states
from t5train.errors import UnknownLayout
from t5train.sidecar import ParameterSlot


def partitioned_groups(checkpoint: OpenedCheckpoint, _module: ModuleStates) -> list[FlatGroup]:
    """The parameter groups of a ZeRO 1 or 2 optimizer: dense ones once, those of experts for each rank of theirs."""
    model = model_states(checkpoint, MODEL_STATES)
    ranks = ExpertRanks.of(model)
    states = zero12.optimizer_states(checkpoint, ranks.size)
    counts = {layer.path: len(layer.experts) for layer in expert_layers(checkpoint)}
    found: list[FlatGroup] = []
    recorded: list[list[Sequence[ParameterSlot]]] = [[] for _ in states]
    for index, stored in enumerate(zero12.stored_slots(checkpoint, model, states[0])):
        size = _expert_parallel_size(checkpoint, states[0], index, stored)
        for expert_rank, holders in enumerate(ranks.holding(size)):
            slots = [_of_rank(checkpoint, slot, expert_rank, size, counts) for slot in stored]
            partitions = [zero12.partition(states[rank], index) for rank in holders]
            found.append(FlatGroup(index, partitions, slots, zero12.ALIGNED_ELEMENTS * len(holders)))
            for rank in holders:
                recorded[rank].append(slots)
    zero12.require_recorded(checkpoint, recorded)
    return found


def _expert_parallel_size(
    checkpoint: OpenedCheckpoint, state: Mapping[str, Any], index: int, slots: Sequence[ParameterSlot]
) -> int:
    """Over how many expert-parallel ranks a group is spread, 1 if it is dense; three sources must agree."""
    num_ranks = ExpertRanks.of(model_states(checkpoint, MODEL_STATES)).size
    cut_over = int(_entry(state.get("partition_count"), index) or 0)
    size = num_ranks // cut_over if cut_over and num_ranks % cut_over == 0 else 0
    of_experts = {ExpertName.parse(slot.name) is not None for slot in slots}
    told = _told(state, index)
    if not size or len(of_experts) != 1 or (size > 1 and of_experts == {False}) or told not in (None, size):
        raise UnknownLayout(
            f"{checkpoint.folder}: parameter group {index} is cut over {cut_over} of {num_ranks} ranks, its optimizer "
            f"tells of {told} expert-parallel ranks, and it holds {[slot.name for slot in slots][:3]}"
        )
    return size


def _told(state: Mapping[str, Any], index: int) -> int | None:
    inner = state.get("base_optimizer_state")
    group = _entry(inner.get("param_groups") if isinstance(inner, Mapping) else None, index)
    return expert_parallel_size(group) if isinstance(group, Mapping) else None


def _entry(items: Any, index: int) -> Any:
    return items[index] if isinstance(items, list) and index < len(items) else None


def _of_rank(
    checkpoint: OpenedCheckpoint, slot: ParameterSlot, expert_rank: int, size: int, counts: Mapping[str, int]
) -> ParameterSlot:
    """A slot of rank 0 as it is on another expert-parallel rank, by the name the result will have."""
    name = ExpertName.parse(slot.name)
    if name is None:
        return slot.model_copy(update={"name": checkpoint.result_name(slot.name)})
    count = counts.get(name.layer, 0)
    if count % size or name.expert >= count // size:
        raise UnknownLayout(
            f"{checkpoint.folder}: {slot.name} is of a layer with {count} experts over {size} expert-parallel ranks"
        )
    everywhere = replace(name, expert=expert_rank * (count // size) + name.expert)
    return slot.model_copy(update={"name": checkpoint.result_name(str(everywhere))})

"""Which elements of which tensor this rank's optimizer updates.

At ZeRO 1 and 2, they are one piece of the group's flat buffer, which is partitioned over the ranks that share it. At
ZeRO 3, they are a piece of each parameter, one after the other in the flat buffer of a sub-group. At ZeRO 0, the
optimizer updates whole tensors: in fp32 the parameters themselves, in bf16 their fp32 copies.
"""

from collections import Counter
from itertools import chain
from typing import Any

from deepspeed import comm
from torch import Tensor

from t5train.engine.collectives import gather_objects
from t5train.engine.optimizer import Partition, Segment
from t5train.engine.parameter_layout import describe, huggingface_names
from t5train.model.parameters import ParameterSlot, is_decayed


def partitions_of(engine: Any, decays_all: bool = False) -> dict[Tensor, Partition]:
    """Return the parts of parameters that each tensor of the engine's inner optimizer is made of.

    With ``decays_all``, weight decay shrinks all of them, not only those that ``is_decayed`` names.
    """
    names, groups = huggingface_names(engine.module, expert_rank=0), describe(engine)
    if not engine.zero_optimization():  # the optimizer updates each parameter separately
        groups = [[slot] for group in groups for slot in group]

    def marked(segment: Segment, slots: list[ParameterSlot]) -> Segment:
        slot = slots[segment.owner]
        return segment._replace(is_decayed=decays_all or is_decayed(names[slot.name], slot.shape))

    return {
        flat: Partition([marked(each, slots) for each in _segments(engine, slots, flat, sharers)], len(slots), sharers)
        for flat, slots, sharers in zip(masters_of(engine), groups, _sharers(engine, len(groups)), strict=True)
    }


def shared_by_stages(engine: Any, decays_all: bool = False) -> dict[Tensor, Partition]:
    """Return ``partitions_of`` a pipeline stage, with owners numbered over the whole model and shared by all ranks.

    Copies of a tied weight are partitioned at different offsets, so separate sums of their squares could differ in the
    last bit. Therefore one sum is taken over all copies.
    """
    names = huggingface_names(engine.module, expert_rank=0)
    (group,) = describe(engine)
    mine = [names[slot.name] for slot in group]
    copies = Counter(chain.from_iterable(gather_objects(mine)[:: engine.dp_world_size]))
    numbers = {name: number for number, name in enumerate(sorted(copies))}

    def over_all(segment: Segment) -> Segment:
        name = mine[segment.owner]
        return segment._replace(owner=numbers[name], numel=segment.numel * copies[name])

    return {
        flat: Partition([*map(over_all, held.segments)], len(numbers))
        for flat, held in partitions_of(engine, decays_all).items()
    }


def masters_of(engine: Any) -> list[Tensor]:
    """Return the fp32 tensors that this rank's optimizer updates."""
    return list(chain.from_iterable(master_groups_of(engine)))


def master_groups_of(engine: Any) -> list[list[Tensor]]:
    """Return the fp32 tensors that this rank's optimizer updates, by parameter group: dense ones, each set of experts.

    ZeRO 3 keeps them itself and passes them to the optimizer one at a time. There, they form a single group.
    """
    if engine.zero_optimization_partition_weights():
        return [list(engine.optimizer.fp32_partitioned_groups_flat)]
    return [list(group["params"]) for group in inner_optimizer(engine).param_groups]


def inner_optimizer(engine: Any) -> Any:
    """Return the optimizer that we passed to DeepSpeed, without DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _sharers(engine: Any, num_flats: int) -> list[Any]:
    """Return the process group that each flat tensor is partitioned over. Experts are shared by some ranks only."""
    if not engine.zero_optimization() or engine.zero_optimization_partition_weights():
        return [None] * num_flats
    return list(engine.optimizer.real_dp_process_group)


def _segments(engine: Any, slots: list[ParameterSlot], flat: Tensor, sharers: Any) -> list[Segment]:
    if not engine.zero_optimization():
        return [Segment(0, flat.numel(), 0, flat.numel(), 0)]
    if engine.zero_optimization_partition_weights():
        return _cut_one_by_one(slots, engine.global_rank, engine.world_size)
    return _cut_joined(slots, comm.get_rank(group=sharers), flat.numel())


def _cut_joined(slots: list[ParameterSlot], rank: int, numel: int) -> list[Segment]:
    """Return the content of this rank's piece of a flat buffer that is cut into pieces of ``numel`` elements."""
    first, found = numel * rank, []
    for owner, slot in enumerate(slots):
        start, stop = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
        if start < stop:
            found.append(Segment(start - first, stop - first, owner, slot.numel, start - slot.offset))
    return found


def _cut_one_by_one(slots: list[ParameterSlot], rank: int, num_ranks: int) -> list[Segment]:
    """Return the content, without padding, of a flat buffer with one of ``num_ranks`` pieces of each parameter."""
    found = []
    for owner, slot in enumerate(slots):
        piece = -(-slot.numel // num_ranks)
        held = min(piece, slot.numel - rank * piece)
        if held > 0:
            found.append(Segment(slot.offset, slot.offset + held, owner, slot.numel, rank * piece))
    return found

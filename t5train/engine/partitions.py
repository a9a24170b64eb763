"""Which elements of which tensor this rank's optimizer moves.

At ZeRO 1 and 2 that is a piece of the group's flat buffer, which is cut over the ranks that share it; at ZeRO 3 a piece
of each parameter, one behind the other in the flat buffer of a sub-group; at ZeRO 0 the optimizer steps whole tensors,
which are the parameters themselves in fp32, and their fp32 copies in bf16.
"""

from collections import Counter
from itertools import chain
from typing import Any

from deepspeed import comm
from torch import Tensor

from t5train.engine.collectives import gather_objects
from t5train.engine.optimizer import Partition, Segment
from t5train.engine.parameter_layout import describe, huggingface_names
from t5train.model.parameters import ParameterSlot


def partitions_of(engine: Any) -> dict[Tensor, Partition]:
    """For every tensor the engine's inner optimizer steps: the parts of parameters it is made of."""
    masters = masters_of(engine)
    if not engine.zero_optimization():
        return {whole: Partition([Segment(0, whole.numel(), 0, whole.numel(), 0)], 1) for whole in masters}
    groups = zip(masters, describe(engine), _sharers(engine), strict=True)
    return {
        flat: Partition(_segments(engine, slots, flat, sharers), len(slots), sharers) for flat, slots, sharers in groups
    }


def shared_by_stages(engine: Any) -> dict[Tensor, Partition]:
    """``partitions_of`` a stage of a pipeline, with owners numbered over the whole model; all ranks share them.

    Copies of a tied weight are cut in other places: summed each by itself, their squares could differ in a last bit.
    The sum over all copies is one number, and each of them counts.
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
        flat: Partition([*map(over_all, held.segments)], len(numbers)) for flat, held in partitions_of(engine).items()
    }


def masters_of(engine: Any) -> list[Tensor]:
    """The fp32 tensors this rank's optimizer moves."""
    return list(chain.from_iterable(master_groups_of(engine)))


def master_groups_of(engine: Any) -> list[list[Tensor]]:
    """The fp32 tensors this rank's optimizer moves, by parameter group: dense ones, and each kind of experts.

    ZeRO 3 hands them to the optimizer one at a time, and keeps them itself; all of them are one group there.
    """
    if engine.zero_optimization_partition_weights():
        return [list(engine.optimizer.fp32_partitioned_groups_flat)]
    return [list(group["params"]) for group in inner_optimizer(engine).param_groups]


def inner_optimizer(engine: Any) -> Any:
    """The optimizer we handed to DeepSpeed, inside whatever it put around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _sharers(engine: Any) -> list[Any]:
    """Of each parameter group the process group it is cut over: experts are the same on some of the ranks only."""
    if engine.zero_optimization_partition_weights():
        return [None] * len(engine.optimizer.fp16_groups)
    return list(engine.optimizer.real_dp_process_group)


def _segments(engine: Any, slots: list[ParameterSlot], flat: Tensor, sharers: Any) -> list[Segment]:
    if engine.zero_optimization_partition_weights():
        return _cut_one_by_one(slots, engine.global_rank, engine.world_size)
    return _cut_joined(slots, comm.get_rank(group=sharers), flat.numel())


def _cut_joined(slots: list[ParameterSlot], rank: int, numel: int) -> list[Segment]:
    """Of a flat buffer that is cut into pieces of ``numel`` elements: what lies in this rank's."""
    first, found = numel * rank, []
    for owner, slot in enumerate(slots):
        start, stop = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
        if start < stop:
            found.append(Segment(start - first, stop - first, owner, slot.numel, start - slot.offset))
    return found


def _cut_one_by_one(slots: list[ParameterSlot], rank: int, num_ranks: int) -> list[Segment]:
    """Of a flat buffer with a piece of each parameter, which is cut into ``num_ranks``: all but the padding."""
    found = []
    for owner, slot in enumerate(slots):
        piece = -(-slot.numel // num_ranks)
        held = min(piece, slot.numel - rank * piece)
        if held > 0:
            found.append(Segment(slot.offset, slot.offset + held, owner, slot.numel, rank * piece))
    return found

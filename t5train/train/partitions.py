"""Which elements of which tensor this rank's optimizer moves."""

from typing import Any

from torch import Tensor

from t5train.sidecar import ParameterSlot
from t5train.train.optimizer import Partition, Segment
from t5train.train.parameter_layout import describe


def partitions_of(engine: Any) -> dict[Tensor, Partition]:
    """For every tensor the engine's inner optimizer steps: the parts of parameters it is made of."""
    groups = describe(engine)
    param_groups = inner_optimizer(engine).param_groups
    if not groups:
        return {
            parameter: Partition([Segment(0, parameter.numel(), 0, parameter.numel())], 1)
            for group in param_groups
            for parameter in group["params"]
        }
    return {
        group["params"][0]: Partition(
            _segments(slots, _first_element(engine, index), group["params"][0].numel()), len(slots)
        )
        for index, (group, slots) in enumerate(zip(param_groups, groups, strict=True))
    }


def inner_optimizer(engine: Any) -> Any:
    """The optimizer we handed to DeepSpeed, inside whatever it put around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def is_partitioned(engine: Any) -> bool:
    """Whether each rank's optimizer holds only its part."""
    return hasattr(engine.optimizer, "partition_size")


def _first_element(engine: Any, group: int) -> int:
    if not is_partitioned(engine):
        return 0
    return int(engine.optimizer.partition_size[group]) * int(engine.global_rank)


def _segments(slots: list[ParameterSlot], first: int, numel: int) -> list[Segment]:
    found = []
    for owner, slot in enumerate(slots):
        start, stop = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
        if start < stop:
            found.append(Segment(start - first, stop - first, owner, slot.numel))
    return found

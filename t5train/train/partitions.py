"""Which elements of which tensor this rank's optimizer moves.

At ZeRO 1 and 2 that is a piece of the group's flat buffer; at ZeRO 0 the optimizer steps whole tensors, which are the
parameters themselves in fp32, and their fp32 copies in bf16.
"""

from typing import Any

from torch import Tensor

from t5train.sidecar import ParameterSlot
from t5train.train.optimizer import Partition, Segment
from t5train.train.parameter_layout import describe


def partitions_of(engine: Any) -> dict[Tensor, Partition]:
    """For every tensor the engine's inner optimizer steps: the parts of parameters it is made of."""
    param_groups = inner_optimizer(engine).param_groups
    if not engine.zero_optimization():
        return {
            whole: Partition([Segment(0, whole.numel(), 0, whole.numel())], 1)
            for group in param_groups
            for whole in group["params"]
        }
    return {
        flat: Partition(_segments(slots, flat.numel() * engine.global_rank, flat.numel()), len(slots))
        for flat, slots in zip((group["params"][0] for group in param_groups), describe(engine), strict=True)
    }


def inner_optimizer(engine: Any) -> Any:
    """The optimizer we handed to DeepSpeed, inside whatever it put around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _segments(slots: list[ParameterSlot], first: int, numel: int) -> list[Segment]:
    found = []
    for owner, slot in enumerate(slots):
        start, stop = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
        if start < stop:
            found.append(Segment(start - first, stop - first, owner, slot.numel))
    return found

"""Averages 16-bit gradients over ranks during the backward pass, and keeps this rank's partition of the result.

DeepSpeed's hooks take the host 0.16 ms for each parameter: with experts, that is longer than the GPU needs for the
pass. Here, a hook makes one copy, and what is reduced overlaps with the rest of the pass.

A group's flat buffer is cut into buckets of whole parameters. A bucket is reduced when it has the gradients of all its
parameters. Ranks always reduce buckets in the same order, from the end of the model, whatever the order in which
gradients are complete. So all-reduces match, also if only some ranks use a parameter, and equal gradients give equal
bits.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from deepspeed import comm
from torch import Tensor


class FlatGroup(NamedTuple):
    """A parameter group of ZeRO 1 or 2: every rank of ``sharers`` owns one of as many equal partitions of ``flat``."""

    flat: Tensor
    """The weights of the model, 16 bits [elements]; ends with padding."""
    parameters: Sequence[Tensor]
    """Views of ``flat``, one behind the other."""
    sharers: Any
    """A process group."""

    @property
    def owned(self) -> range:
        """Which elements this rank owns."""
        size = self.flat.numel() // comm.get_world_size(group=self.sharers)
        return range(size * comm.get_rank(group=self.sharers), size * (comm.get_rank(group=self.sharers) + 1))


class _Bucket:
    """Consecutive parameters of a group, and their gradients while a pass needs them."""

    def __init__(self, group: int, parameters: list[Tensor]) -> None:
        self.group = group
        self.start = parameters[0].storage_offset()
        self.stop = parameters[-1].storage_offset() + parameters[-1].numel()
        self.parameters = parameters
        self.missing = set(parameters)
        self._gradients: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        """The gradients [stop - start]. Uninitialised memory is allocated if there is none."""
        if self._gradients is None:
            self._gradients = self.parameters[0].new_empty(self.stop - self.start)
        return self._gradients

    def part_of(self, parameter: Tensor) -> Tensor:
        """Return the gradient of ``parameter``, a view of ``gradients`` in its shape."""
        first = parameter.storage_offset() - self.start
        return self.gradients[first : first + parameter.numel()].view_as(parameter)

    def clear(self) -> None:
        """Prepare for the next pass."""
        self.missing, self._gradients = set(self.parameters), None


class GradientReduction:
    """Reduces the gradients of all groups. ``take`` and ``finish`` are collectives of all ranks."""

    def __init__(
        self, groups: Sequence[FlatGroup], order: Sequence[Tensor], ranks: int, dtype: torch.dtype, bucket_elements: int
    ) -> None:
        """Prepare to average over ``ranks`` ranks, and to sum the passes of a step in ``dtype``.

        ``order``: all parameters, roughly in the order in which their gradients are complete.
        """
        self._groups, self._ranks, self._dtype = groups, ranks, dtype
        self._sums: dict[int, Tensor] = {}
        position = {parameter: number for number, parameter in enumerate(order)}
        cut = [_Bucket(i, part) for i, group in enumerate(groups) for part in _parts(group.parameters, bucket_elements)]
        self._buckets = sorted(cut, key=lambda bucket: position[bucket.parameters[0]])
        self._bucket_of = {parameter: bucket for bucket in cut for parameter in bucket.parameters}
        self._waiting = deque(self._buckets)
        self._reducing: tuple[_Bucket, Any] | None = None

    def take(self, parameter: Tensor) -> None:
        """Copy and drop the gradient of ``parameter``, which is complete, and reduce the buckets that are full."""
        bucket = self._bucket_of[parameter]
        bucket.part_of(parameter).copy_(cast(Tensor, parameter.grad))
        bucket.missing.remove(parameter)
        parameter.grad = None
        while self._waiting and not self._waiting[0].missing:
            self._reduce(self._waiting.popleft())

    def finish(self) -> None:
        """End a pass: reduce what is left, with zeros for parameters that nothing depended on, and add it up."""
        while self._waiting:
            bucket = self._waiting.popleft()
            for parameter in bucket.missing:
                bucket.part_of(parameter).zero_()
            self._reduce(bucket)
        self._add_reduced()
        self._waiting.extend(self._buckets)

    def sum_of(self, group: int) -> Tensor:
        """Return this rank's partition of a group: mean gradients, summed over the passes since ``clear``."""
        if group not in self._sums:
            flat, owned = self._groups[group].flat, self._groups[group].owned
            self._sums[group] = flat.new_zeros(len(owned), dtype=self._dtype)
        return self._sums[group]

    def clear(self) -> None:
        """Start the sums of the next step."""
        self._sums.clear()

    def _reduce(self, bucket: _Bucket) -> None:
        """Start to reduce a bucket. Only one is being reduced at a time, so that few need memory."""
        self._add_reduced()
        sharers = self._groups[bucket.group].sharers
        is_shared = comm.get_world_size(group=sharers) > 1
        work = comm.all_reduce(bucket.gradients, group=sharers, async_op=True) if is_shared else None
        self._reducing = bucket, work

    def _add_reduced(self) -> None:
        """Wait for the bucket that is being reduced, on the accelerator if it has streams, and add this rank's part."""
        if self._reducing is None:
            return
        (bucket, work), self._reducing = self._reducing, None
        if work is not None:
            work.wait()
        owned = self._groups[bucket.group].owned
        first, last = max(bucket.start, owned.start), min(bucket.stop, owned.stop)
        if first < last:
            reduced = bucket.gradients[first - bucket.start : last - bucket.start]
            self.sum_of(bucket.group)[first - owned.start : last - owned.start].add_(reduced, alpha=1 / self._ranks)
        bucket.clear()


def _parts(parameters: Sequence[Tensor], elements: int) -> list[list[Tensor]]:
    """Cut into runs of at most so many elements, or of one parameter if that has more."""
    parts: list[list[Tensor]] = []
    held = 0
    for parameter in parameters:
        if not parts or held + parameter.numel() > elements:
            parts.append([])
            held = 0
        parts[-1].append(parameter)
        held += parameter.numel()
    return parts

"""The update of AdamWRms over a flat ZeRO partition in two passes, without waiting for the GPU.

1. ``squares``: sums of squares of each parameter's weights and of its gradient.
2. In between, ranks add up these sums, if there are several.
3. ``update``: clipping, moments, weight decay, step relative to the RMS, and the rounded weights of the model.

``Chunks`` cuts all segments of a partition into chunks, one for each program of a kernel. A chunk is summed in a fixed
order to one fp64 number, and these numbers are added up in a fixed order, too: every run gives the same bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from t5train.engine import update_kernels
from t5train.engine.optimizer import MINIMAL_RMS, Partition, SumOverRanks
from t5train.model.kernels.operators import ROUNDING

CHUNK_ELEMENTS = 4096
_BLOCK_ELEMENTS, _WARPS, _OWNER_WIDTH = 2048, 8, 1024
_ALIGNMENT = 16
"""Chunks that begin at a multiple of so many elements are read 16 bytes at a time."""
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Chunks(NamedTuple):
    """The chunks of a partition, on its device. Built once, because the layout does not change during a run."""

    rows: Tensor
    """int64 [4, chunks]: first element in the partition, length, segment, first element in the segment."""
    owners: Tensor
    """int64 [2, owners]: first chunk and number of chunks."""
    owner_of_segment: Tensor
    """int64 [segments]."""
    is_decayed: Tensor
    """int8 [segments]: 1 where weight decay shrinks the weights."""
    numels: Tensor
    """fp64 [owners]: elements of the whole parameter, over all ranks; 1 if it lies elsewhere."""
    starts: list[int]
    lengths: list[int]
    is_aligned: bool

    @classmethod
    def of(cls, partition: Partition, device: torch.device) -> "Chunks":
        """Cut a partition into chunks."""
        rows: list[list[int]] = []
        owners, numels = [[0, 0] for _ in range(partition.num_owners)], [1] * partition.num_owners
        for index, segment in sorted(enumerate(partition.segments), key=lambda pair: pair[1].owner):
            starts = range(segment.start, segment.stop, CHUNK_ELEMENTS)
            first, count = owners[segment.owner]
            owners[segment.owner] = [first if count else len(rows), count + len(starts)]
            numels[segment.owner] = segment.numel
            rows += ([at, min(CHUNK_ELEMENTS, segment.stop - at), index, at - segment.start] for at in starts)
        return cls(
            torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).T.contiguous().to(device),
            torch.tensor(owners, dtype=torch.int64).reshape(-1, 2).T.contiguous().to(device),
            torch.tensor([segment.owner for segment in partition.segments], dtype=torch.int64).to(device),
            torch.tensor([segment.is_decayed is not False for segment in partition.segments], dtype=torch.int8).to(
                device
            ),
            torch.tensor(numels, dtype=torch.float64).to(device),
            [segment.start for segment in partition.segments],
            [segment.stop - segment.start for segment in partition.segments],
            all(segment.start % _ALIGNMENT == 0 for segment in partition.segments),
        )


class Gradients(NamedTuple):
    """Where the gradient of each segment lies. They are read there, because joining them would cost two passes."""

    addresses: Tensor
    """int64 [segments], on the device."""
    kind: Any
    is_aligned: bool
    held: Sequence[Tensor]
    """The gradients, so that they live as long as their addresses."""

    @classmethod
    def of(cls, chunks: Chunks, held: Sequence[Tensor]) -> "Gradients":
        """Find the gradients of all segments, a tensor for each.

        Raises ValueError if they do not fit the segments.
        """
        kinds = {gradient.dtype for gradient in held}
        fit = [gradient.numel() for gradient in held] == chunks.lengths
        if not fit or len(kinds) > 1 or not all(gradient.is_contiguous() for gradient in held):
            raise ValueError("gradients must be contiguous, of one type, and as long as the segments")
        addresses = [gradient.data_ptr() for gradient in held]
        device = chunks.numels.device
        on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(
            on_host.to(device, non_blocking=True),
            _KINDS[kinds.pop() if kinds else torch.float32],
            chunks.is_aligned and all(address % 16 == 0 for address in addresses),
            held,
        )


class Settings(NamedTuple):
    """The settings of one update."""

    rate: float
    step: int
    """Counts from one."""
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clip: float
    """The largest gradient norm; 0 for no clipping."""
    relative: bool


def squares(chunks: Chunks, flat: Tensor, gradients: Gradients) -> Tensor:
    """Return fp64 [2, owners]: sums of squares of each parameter's weights and gradient in this partition, or zero."""
    num_chunks, num_owners = chunks.rows.shape[1], chunks.numels.numel()
    sums, partial = (chunks.numels.new_empty(2, columns) for columns in (num_owners, num_chunks))
    if num_chunks:
        update_kernels.squares_of_chunks[(num_chunks,)](
            flat, gradients.addresses, chunks.rows, partial, num_chunks, KIND=gradients.kind,
            ALIGNED=gradients.is_aligned, CHUNK=CHUNK_ELEMENTS, BLOCK=_BLOCK_ELEMENTS, num_warps=_WARPS, **ROUNDING,
        )  # fmt: skip
    update_kernels.squares_of_owners[(num_owners, 2)](
        partial, chunks.owners, sums, num_chunks, num_owners, WIDTH=_OWNER_WIDTH, **ROUNDING
    )
    return sums


def update(
    chunks: Chunks,
    state: tuple[Tensor, Tensor, Tensor],
    gradients: Gradients,
    rounded: Tensor | None,
    sums: Tensor,
    norm: Tensor,
    settings: Settings,
) -> None:
    """Update ``state`` (weights, first and second moments) in place, and write the new weights to ``rounded``.

    ``sums`` [owners] are the squares of whole parameters, over all ranks that share them; ``norm`` is the gradient norm
    over all ranks. If it is not finite, nothing changes, so the host need not look at it before.
    """
    (beta1, beta2), num_chunks = settings.betas, chunks.rows.shape[1]
    if num_chunks:
        update_kernels.update_chunks[(num_chunks,)](
            *state, gradients.addresses, rounded, chunks.rows, chunks.owner_of_segment, chunks.is_decayed, sums,
            chunks.numels, norm,
            1 - settings.rate * settings.weight_decay, 1 - beta1, beta2, 1 - beta2,
            (1 - beta2**settings.step) ** -0.5, settings.epsilon, -settings.rate / (1 - beta1**settings.step),
            settings.clip, num_chunks, KIND=gradients.kind, RELATIVE=settings.relative, CLIPPED=settings.clip > 0,
            MINIMAL=MINIMAL_RMS, ALIGNED=gradients.is_aligned, CHUNK=CHUNK_ELEMENTS, BLOCK=_BLOCK_ELEMENTS,
            num_warps=_WARPS, **ROUNDING,
        )  # fmt: skip


class PartitionUpdate:
    """The update of partitions one at a time, by gradients that are already clipped and known to be finite.

    ``AdamWRms.use_kernels`` takes it. At ZeRO 3, DeepSpeed checks and clips gradients, and then has its sub-groups
    updated one after the other. torch's operators read and write about 90 bytes for each element, these kernels 36.
    """

    def __init__(
        self, partitions: Mapping[Tensor, Partition], sum_over_ranks: SumOverRanks | None, relative: bool
    ) -> None:
        self._partitions, self._sum_over_ranks, self._relative = partitions, sum_over_ranks, relative
        self._chunks = {flat: Chunks.of(partition, flat.device) for flat, partition in partitions.items()}
        self._finite = {flat.device: torch.ones((), device=flat.device) for flat in partitions}

    def __call__(self, flat: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update a partition and its ``state`` in place. With several ranks, a collective of those that share it."""
        partition, chunks = self._partitions[flat], self._chunks[flat]
        gradients = Gradients.of(chunks, partition.parts_of(gradient.view(-1)))
        sums = squares(chunks, flat, gradients)[0]
        if self._relative and self._sum_over_ranks is not None:
            self._sum_over_ranks(sums, partition.sharers)
        step = int(state["step"])
        settings = Settings(
            group["lr"], step, group["betas"], group["eps"], group["weight_decay"], clip=0.0, relative=self._relative
        )
        moved = (flat, state["exp_avg"], state["exp_avg_sq"])
        update(chunks, moved, gradients, None, sums, self._finite[flat.device], settings)

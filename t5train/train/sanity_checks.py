"""Checks that training makes real progress. Each detects a known, costly failure and takes less than 1% of the time."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from t5train.errors import DuplicateBatch, NonFiniteLoss, RanksDisagree, TooManySkippedSteps, WeightsDidNotMove
from t5train.quantities import quantity

# 32 halvings reduce the largest allowed initial loss scale to 1, so this many skipped steps can be legitimate.
SKIPS_WHILE_SCALING = 32
SKIPPED_SHARE = 0.05
SAMPLED_ELEMENTS = 1 << 16
Gather = Callable[[Sequence[int]], list[list[int]]]


def require_finite(step: int, loss: float, gradient_norm: float | None) -> None:
    """Raise NonFiniteLoss if the loss or the gradient norm is not finite. A skipped step has no gradient norm: None."""
    for what, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFiniteLoss(
                f"the {what} is {value} at step {step}: lower optimizer.peak_learning_rate, lengthen the warm-up, or "
                "use bf16 or fp32; the checkpoints before this step are unchanged"
            )


def require_few_skips(step: int, skipped: int) -> None:
    """Raise TooManySkippedSteps if more than 32 steps (to lower the initial loss scale) plus 5% were skipped."""
    bound = SKIPS_WHILE_SCALING + int(SKIPPED_SHARE * step)
    if skipped > bound:
        raise TooManySkippedSteps(
            f"{skipped} of {step} optimizer steps were skipped because fp16 gradients overflowed (at most {bound} are "
            "expected): use optimizer.precision=bf16, or lower optimizer.peak_learning_rate"
        )


def require_distinct_batches(step: int, digests: list[int], data_parallel_size: int) -> None:
    """Compare the digests of a step's samples, by rank. Stages of a replica are ``data_parallel_size`` ranks apart.

    Raises DuplicateBatch if two model replicas got the same samples, RanksDisagree if the stages of one replica got
    different samples.
    """
    seen: dict[int, int] = {}
    for rank, digest in enumerate(digests[:data_parallel_size]):
        if digest in seen:
            raise DuplicateBatch(
                f"ranks {seen[digest]} and {rank} got the same samples at step {step}: the global batch is "
                "smaller than configured; this is a bug in the data loader, please report it"
            )
        seen[digest] = rank
    for rank, digest in enumerate(digests):
        first = rank % data_parallel_size
        if digest != digests[first]:
            raise RanksDisagree(
                f"ranks {first} and {rank}, stages of one pipeline, had different samples at step {step}: inputs "
                "and targets do not belong together; this is a bug in the data loader, please report it"
            )


def identity_of(sample_ids: np.ndarray, epochs: np.ndarray) -> bytes:
    """Return the identity of a batch of the samples ``sample_ids`` int64 [n] in their ``epochs`` int64 [n].

    The epoch is included because a step that spans two epochs may contain an id twice.
    """
    return np.stack([epochs, sample_ids]).tobytes()


class Movement:
    """Checks that fp32 weights change, by a digest of a bounded sample of each flat tensor.

    ``groups`` are the parts of each parameter group that this rank updates. The part of one rank may stay unchanged:
    if it covers only embeddings of pieces that the text does not use, its gradients are zero. A whole group, of the
    model or of a pipeline stage, must change, so ranks combine their observations. ``gather`` returns the integers of
    all ranks, as t5train.engine.collectives.gather does. Every ``data_parallel_size`` consecutive ranks are a pipeline
    stage.
    """

    def __init__(
        self, groups: Iterable[Iterable[Tensor]], applied_steps: int, data_parallel_size: int, gather: Gather
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._data_parallel_size, self._gather = data_parallel_size, gather
        self._digests, self._applied_steps = self._sample(), applied_steps

    def require(self, step: int, applied_steps: int) -> None:
        """Raise WeightsDidNotMove if steps were applied since the last call and a group did not change on any rank.

        This is a collective: either all ranks raise it, or none.
        """
        digests, before = self._sample(), self._digests
        moved = self._gather([now != then for now, then in zip(digests, before, strict=True)])
        applied, self._digests, self._applied_steps = applied_steps - self._applied_steps, digests, applied_steps
        if applied <= 0:
            return
        for first in range(0, len(moved), self._data_parallel_size):
            of_group = zip(*moved[first : first + self._data_parallel_size], strict=True)
            if not all(map(any, of_group)):
                raise WeightsDidNotMove(
                    f"{quantity(applied, 'optimizer step')} up to step {step} did not change the fp32 weights of a "
                    f"parameter group on ranks {first} to {first + self._data_parallel_size - 1}. Raise "
                    "optimizer.peak_learning_rate if it is very small; otherwise, gradients do not reach the "
                    "optimizer: please report this bug"
                )

    def _sample(self) -> list[str]:
        return [_digest(group) for group in self._groups]


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        stride = max(1, flat.numel() // SAMPLED_ELEMENTS)
        digest.update(flat[::stride].to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()

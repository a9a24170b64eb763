"""Checks that what is reported as training is training. Each has cost somebody weeks; none costs a percent."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from t5train.errors import DuplicateBatch, NonFiniteLoss, RanksDisagree, TooManySkippedSteps, WeightsDidNotMove

# 32 halvings take the largest first loss scale allowed to 1, so that many skipped steps can be honest.
SKIPS_WHILE_SCALING = 32
SKIPPED_SHARE = 0.05
SAMPLED_ELEMENTS = 1 << 16
Gather = Callable[[Sequence[int]], list[list[int]]]


def require_finite(step: int, loss: float, gradient_norm: float | None) -> None:
    """NonFiniteLoss when the loss or, where no loss scaler watches it, the gradient norm is not a number."""
    for what, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFiniteLoss(
                f"the {what} is {value} at step {step}: lower optimizer.peak_learning_rate, lengthen the warm-up, or "
                "use bf16 or fp32; the checkpoints before this step are untouched"
            )


def require_few_skips(step: int, skipped: int) -> None:
    """TooManySkippedSteps when the loss scaler dropped more steps than scaling down and 5% can explain."""
    bound = SKIPS_WHILE_SCALING + int(SKIPPED_SHARE * step)
    if skipped > bound:
        raise TooManySkippedSteps(
            f"{skipped} of {step} optimizer steps were skipped because fp16 gradients overflowed (at most {bound} are "
            "honest): use optimizer.precision=bf16, or lower optimizer.peak_learning_rate"
        )


def require_distinct_batches(step: int, digests: list[int], data_parallel_size: int) -> None:
    """Compare digests of a step's samples, by rank; of ranks that differ by ``data_parallel_size`` they are the same.

    DuplicateBatch when two models were given the same samples, RanksDisagree when stages of one were given others.
    """
    seen: dict[int, int] = {}
    for rank, digest in enumerate(digests[:data_parallel_size]):
        if digest in seen:
            raise DuplicateBatch(
                f"ranks {seen[digest]} and {rank} were given the same samples at step {step}: the global batch is "
                "smaller than it claims to be; this is a fault of the data loader, please report it"
            )
        seen[digest] = rank
    for rank, digest in enumerate(digests):
        first = rank % data_parallel_size
        if digest != digests[first]:
            raise RanksDisagree(
                f"ranks {first} and {rank}, stages of one pipeline, had different samples at step {step}: inputs "
                "and targets do not belong together; this is a fault of the data loader, please report it"
            )


def identity_of(sample_ids: np.ndarray, first: int, num_samples: int) -> bytes:
    """Epoch and id of each sample of a batch that begins at ``first`` of the endless order; ``sample_ids`` int64 [n].

    The ids are those really read. Without the epoch, a step in which one ends could rightly hold an id twice.
    """
    epochs = np.arange(first, first + len(sample_ids)) // num_samples
    return np.stack([epochs, sample_ids]).tobytes()


class Movement:
    """Watches whether fp32 weights change, by a digest of a bounded sample of each flat tensor.

    ``groups`` are the parts of each parameter group that this rank moves. A part may rightly stay: where it is cut from
    an embedding and holds only pieces that the text does not use, its gradient is zero. A whole group may not, of the
    model or of a stage of a pipeline; so ranks put together what they see. ``gather`` gives every rank the integers of
    all, as t5train.engine.collectives.gather does; of ranks that differ by ``data_parallel_size`` each has a stage of
    its own.
    """

    def __init__(
        self, groups: Iterable[Iterable[Tensor]], applied_steps: int, data_parallel_size: int, gather: Gather
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._data_parallel_size, self._gather = data_parallel_size, gather
        self._digests, self._applied_steps = self._sample(), applied_steps

    def require(self, step: int, applied_steps: int) -> None:
        """WeightsDidNotMove when steps were applied since the last look and nothing of a group changed on any rank.

        A collective: all ranks raise it, or none.
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
                    f"{applied} optimizer steps up to step {step} left the fp32 weights of a parameter group as they "
                    f"were on ranks {first} to {first + self._data_parallel_size - 1}: the learning rate is zero, or "
                    "gradients do not reach the optimizer"
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

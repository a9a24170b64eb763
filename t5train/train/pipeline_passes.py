"""Forward and backward passes through the stages of a pipeline, which DeepSpeed schedules."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from t5train.data.loader import Batch
from t5train.train.engine import norm_of_step
from t5train.train.passes import StepResult, raise_if_scaled_out
from t5train.train.ranks import on_accelerator


class PipelinePasses:
    """Passes of an engine that holds one stage of the model; see t5train.train.passes.Passes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, batches: Iterator[Batch]) -> StepResult:
        """See Passes; the loss is the mean over all models."""
        try:
            loss = float(self._engine.train_batch(data_iter=map(_as_deepspeed_takes, batches)))
        except Exception as error:  # DeepSpeed raises no class of its own for a loss scale at its minimum
            raise_if_scaled_out(self._engine, error)
            raise
        for _ in batches:  # stages between the first and the last take none: what they would have taken is counted
            pass
        return StepResult(loss, 0.0, norm_of_step(self._engine))

    def token_losses(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """See Passes; the last stage alone computes them."""
        self._engine.total_loss = None  # it would be added to
        self._engine.reset_activation_shape()  # these batches may be of another size than those trained on
        losses = self._engine.eval_batch(
            map(_as_deepspeed_takes, batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )
        self._engine.reset_activation_shape()
        self._engine.module.train()
        return [each.cpu().numpy() for each in losses] if self._engine.is_last_stage() else []


def _as_deepspeed_takes(batch: Batch) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """What the first stage takes, and what the last one does."""
    inputs, targets = on_accelerator(batch.inputs), on_accelerator(batch.targets)
    return (inputs, targets), targets

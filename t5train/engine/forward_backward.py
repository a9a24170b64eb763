"""Forward and backward passes, of an engine that holds the whole model or of a pipeline, which DeepSpeed schedules."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from t5train.data.samples.loader import Batch, Segments
from t5train.engine.collectives import on_accelerator
from t5train.engine.engine import norm_of_step, update
from t5train.engine.expert_routing import Routing
from t5train.engine.gradient_accumulation import Fp32Sums, sums_of
from t5train.errors import TooManySkippedSteps
from t5train.model.t5 import T5, PairRows
from t5train.spec import RunSpec


class StepResult(NamedTuple):
    """Result of a step: mean cross-entropy of the rank's samples, router loss, and gradient norm before clipping.

    What label smoothing and z-loss add is left out, so that the loss compares with that of a validation.

    The norm is None if the loss scaler skipped the step.
    """

    loss: float
    router_loss: float
    gradient_norm: float | None


class Predictions(NamedTuple):
    """For each target token of a batch, [b, t]: the cross-entropy in nats, fp32, and whether it is the likeliest.

    Of padding, the loss is 0, and ``is_hit`` False.
    """

    losses: np.ndarray
    is_hit: np.ndarray


class Passes(Protocol):
    """The passes of an engine: a training step, and losses of samples without training on them."""

    def step(self, batches: Iterator[Batch]) -> StepResult:
        """Run all passes of an optimizer step and its update. Consumes every micro-batch. A collective of all ranks."""

    def token_losses(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """Return the cross-entropy in nats, fp32 [b, t], of each batch, with the model in evaluation mode.

        A collective: every rank must pass the same number of batches, of the same size. The result is empty on a rank
        that computes no losses. Padding has the loss 0.
        """

    def predictions(self, batches: Sequence[Batch]) -> list[Predictions]:
        """As ``token_losses``, with whether the model predicts each token."""


class WholePasses:
    """Passes of an engine that holds the whole model, from the embedding to the loss.

    With ``sums``, the engine gets the summed gradients only after the last pass of a step, and then reduces them.
    ``passes_a_step`` are those of all ranks.
    """

    def __init__(self, engine: Any, routing: Routing, sums: Fp32Sums | None, passes_a_step: int = 1) -> None:
        self._engine, self._routing, self._sums, self._passes_a_step = engine, routing, sums, passes_a_step
        self._model: T5 = engine.module
        engine.enable_backward_allreduce = sums is None

    def step(self, batches: Iterator[Batch]) -> StepResult:
        """See Passes."""
        seen, norm = list[Tensor](), None
        for batch in batches:
            loss = self._engine(*self._arguments(batch))
            self._engine.backward(loss)
            if self._sums and self._engine.is_gradient_accumulation_boundary():
                self._sums.hand_over()
                self._engine.allreduce_gradients()
            # A copy, which the CUDA graph of the next pass does not overwrite. It is read after the last pass: if the
            # host waited for the accelerator here, the accelerator would then wait for the host.
            logged = loss.detach() if batch.segments is None else self._model.cross_entropy
            seen.append(torch.stack([logged, *self._routing.paid()]))
            norm = take_update(self._engine)
        return _result(torch.stack(seen).tolist(), norm)

    def token_losses(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """See Passes."""
        with self._evaluating():
            return [self._model.token_losses(*self._arguments(batch)).cpu().numpy() for batch in batches]

    def predictions(self, batches: Sequence[Batch]) -> list[Predictions]:
        """See Passes."""
        with self._evaluating():
            found = [self._model.predictions(*self._arguments(batch)) for batch in batches]
            return [Predictions(*(each.cpu().numpy() for each in both)) for both in found]

    def _arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments for a batch: rows only of pairs, so that text is compiled without them."""
        tokens = on_accelerator(batch.inputs), on_accelerator(batch.targets)
        return tokens if batch.segments is None else (*tokens, rows_of(batch.segments, self._passes_a_step))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._model.eval()
        with torch.no_grad(), self._uncompiled():
            yield
        self._model.train()

    def _uncompiled(self) -> AbstractContextManager[None]:
        """Switch compiled parts off: evaluation is rare, and DeepSpeed's experts get other sizes with every batch."""
        eager: AbstractContextManager[None] = nullcontext()
        # Blocks that ZeRO 3 gathers have a compiled forward of their own.
        if any(each._compiled_call_impl is not None or "forward" in vars(each) for each in self._model.modules()):
            eager = torch.compiler.set_stance("force_eager")  # imports the compiler, which takes a second
        return eager


def rows_of(segments: Segments, passes_a_step: int) -> PairRows:
    """Return rows of pairs on the accelerator.

    DeepSpeed averages gradients over the passes and ranks of a step. Their scale makes this average that of the mean
    loss of all target tokens of the step, wherever they are.
    """
    inputs, targets = on_accelerator(segments.inputs), on_accelerator(segments.targets)
    scale = torch.full((), passes_a_step / segments.global_targets, dtype=torch.float32, device=inputs.device)
    if segments.input_keys is None or segments.target_keys is None:
        return PairRows(inputs, targets, None, None, scale)
    return PairRows(inputs, targets, on_accelerator(segments.input_keys), on_accelerator(segments.target_keys), scale)


def _result(passes: list[list[float]], norm: float | None) -> StepResult:
    """Return the result of a step from the loss of each pass and, if there are routers, the part that they added."""
    paid = [sum(routers) for _, *routers in passes]
    losses = [loss - mine for (loss, *_), mine in zip(passes, paid, strict=True)]
    return StepResult(sum(losses) / len(losses), sum(paid) / len(paid), norm)


def take_update(engine: Any) -> float | None:
    """Call ``update``. Raises TooManySkippedSteps if fp16 gradients overflow at the smallest loss scale."""
    try:
        return update(engine)
    except Exception as error:  # DeepSpeed has no exception class for it
        raise_if_scale_is_minimal(engine, error)
        raise


def raise_if_scale_is_minimal(engine: Any, error: Exception) -> None:
    """Raise TooManySkippedSteps if ``error`` is DeepSpeed's error for a loss scale at its minimum."""
    if "loss scale" in str(error):
        raise TooManySkippedSteps(
            f"fp16 gradients still overflow at step {engine.global_steps + 1} with the loss scale at its minimum: "
            "use optimizer.precision=bf16, or lower optimizer.peak_learning_rate"
        ) from error


class PipelinePasses:
    """Passes of an engine that holds one pipeline stage of the model."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, batches: Iterator[Batch]) -> StepResult:
        """See Passes; the loss is the mean over all model replicas."""
        try:
            loss = float(self._engine.train_batch(data_iter=map(_as_deepspeed_takes, batches)))
        except Exception as error:  # DeepSpeed has no exception class for a loss scale at its minimum
            raise_if_scale_is_minimal(self._engine, error)
            raise
        for _ in batches:  # stages between the first and the last take no batches; count them nevertheless
            pass
        return StepResult(loss, 0.0, norm_of_step(self._engine))

    def token_losses(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """See Passes; only the last stage computes them."""
        self._engine.total_loss = None  # otherwise the new loss would be added to it
        self._engine.reset_activation_shape()  # these batches may differ in size from those of training
        losses = self._engine.eval_batch(
            map(_as_deepspeed_takes, batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )
        self._engine.reset_activation_shape()
        self._engine.module.train()
        return [each.cpu().numpy() for each in losses] if self._engine.is_last_stage() else []

    def predictions(self, batches: Sequence[Batch]) -> list[Predictions]:
        """See Passes; RunSpec refuses pipelines for pairs, which alone need it."""
        raise NotImplementedError


def passes_of(engine: Any, spec: RunSpec, routing: Routing) -> Passes:
    """Return the passes of an engine that was built for ``spec``."""
    if spec.layout.pipeline_stages > 1:
        return PipelinePasses(engine)
    passes_a_step = spec.data_parallel_size * spec.gradient_accumulation
    return WholePasses(engine, routing, sums_of(engine.module, spec), passes_a_step)


def _as_deepspeed_takes(batch: Batch) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the input of the first stage, (inputs, targets), and that of the last stage, the targets."""
    inputs, targets = on_accelerator(batch.inputs), on_accelerator(batch.targets)
    return (inputs, targets), targets

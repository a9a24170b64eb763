"""The DeepSpeed engine of a run."""

from typing import Any, cast

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from t5train.model.initialise import initialise
from t5train.model.shape import T5Shape
from t5train.model.t5 import T5
from t5train.spec import RunSpec
from t5train.train.deepspeed_config import deepspeed_config
from t5train.train.optimizer import AdamWRms
from t5train.train.partitions import inner_optimizer, partitions_of


def build_engine(spec: RunSpec, shape: T5Shape, pad_id: int) -> Any:
    """Initialise model, optimizer and DeepSpeed; every rank starts from the same numbers."""
    model = T5(shape, decoder_start_id=pad_id)
    initialise(model, shape, spec.optimizer.seed)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(spec, model), config=deepspeed_config(spec))
    inner_optimizer(engine).attach(partitions_of(engine), comm.all_reduce if engine.zero_optimization() else None)
    if spec.model.compile:
        engine.compile()
    return engine


def set_learning_rate(engine: Any, rate: float) -> None:
    """The rate of the next optimizer step."""
    for group in inner_optimizer(engine).param_groups:
        group["lr"] = rate


def model_of(engine: Any) -> T5:
    """The module inside the engine."""
    return cast(T5, engine.module)


def masters_of(engine: Any) -> list[Tensor]:
    """The tensors this rank's optimizer moves."""
    return [flat for group in inner_optimizer(engine).param_groups for flat in group["params"]]


def update(engine: Any) -> float | None:
    """End a pass; at the last pass of a step move the weights. Returns the step's gradient norm before clipping.

    None between steps, and where the loss scaler skipped the step.
    """
    is_last = engine.is_gradient_accumulation_boundary()
    # The plain fp32 engine clips by a norm that it keeps to itself.
    plain = _gradient_norm(engine) if is_last and engine.optimizer is inner_optimizer(engine) else None
    engine.step()
    if not is_last or plain is not None:
        return plain
    if engine.fp16_enabled() and not engine.was_step_applied():
        return None
    return float(engine.get_global_grad_norm())


def _gradient_norm(engine: Any) -> float:
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def accelerator_memory_bytes() -> int:
    """Most memory held on this rank's accelerator since the last call; of the process where that is the CPU."""
    accelerator = get_accelerator()
    peak = int(accelerator.max_memory_allocated())
    accelerator.reset_peak_memory_stats()
    return peak


def _optimizer(spec: RunSpec, model: T5) -> AdamWRms:
    settings = spec.optimizer
    return AdamWRms(
        model.parameters(),
        betas=settings.betas,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        relative=settings.kind == "adamw-rms",
    )

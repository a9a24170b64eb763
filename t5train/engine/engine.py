"""Builds the DeepSpeed engine of a run.

A model with experts or a pipeline cannot be compiled as a whole, because an expert's number of tokens is known only at
run time, and pipeline stages communicate outside any graph. Its blocks are compiled one by one instead. They are all
alike, so the code compiled for one block is reused for all blocks of its kind.
"""

import resource
from typing import TYPE_CHECKING, Any, cast

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from t5train.data.span_corruption import geometry
from t5train.engine.collectives import expert_rank, rank
from t5train.engine.deepspeed_config import deepspeed_config
from t5train.engine.gradient_accumulation import sums_of
from t5train.engine.optimizer import AdamWRms, HostAdam
from t5train.engine.parameter_layout import huggingface_names
from t5train.engine.partitions import inner_optimizer, partitions_of, shared_by_stages
from t5train.model.activation_checkpointing import checkpoint_activations
from t5train.model.initialization import Fill
from t5train.model.model_shape import T5Shape
from t5train.model.t5 import T5, Block
from t5train.spec import RunSpec

if TYPE_CHECKING:
    from t5train.model.pipeline_model import T5Pipeline


def compile_sublayers(model: nn.Module) -> None:
    """Compile attention and feed-forward of every block of ``model`` in place, except experts and their router."""
    for block in model.modules():
        if isinstance(block, Block):
            for step in block.layer[:-1] if block.is_sparse else block.layer:
                step.compile()


def build_engine(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, node_local: bool) -> Any:
    """Initialise model, optimizer and DeepSpeed. ``fill`` sets the same initial values on every rank.

    ``node_local``: the engine's checkpoints are on each node's own disk.
    """
    build = _pipeline_engine if spec.layout.pipeline_stages > 1 else _engine
    engine = build(spec, shape, pad_id, fill, deepspeed_config(spec, shape, node_local))
    partitions = shared_by_stages(engine) if spec.layout.pipeline_stages > 1 else partitions_of(engine)
    inner_optimizer(engine).attach(partitions, _sum_over_ranks if engine.zero_optimization() else None)
    if spec.model.compile and (spec.model.moe.num_experts or spec.layout.pipeline_stages > 1):
        compile_sublayers(engine.module)
    elif spec.model.compile:
        engine.compile()
    return engine


def set_learning_rate(engine: Any, rate: float) -> None:
    """Set the learning rate of the next optimizer step."""
    for group in inner_optimizer(engine).param_groups:
        group["lr"] = rate


def model_of(engine: Any) -> "T5 | T5Pipeline":
    """Return the module inside the engine."""
    return cast("T5 | T5Pipeline", engine.module)


def update(engine: Any) -> float | None:
    """End a pass. After the last pass of a step, update the weights and return the gradient norm before clipping.

    Returns None after any other pass, and if the loss scaler skipped the step.
    """
    is_last = engine.is_gradient_accumulation_boundary()
    # The plain fp32 engine does not expose the norm that it clips by.
    plain = _gradient_norm(engine) if is_last and engine.optimizer is inner_optimizer(engine) else None
    engine.step()
    return norm_of_step(engine) if is_last and plain is None else plain


def norm_of_step(engine: Any) -> float | None:
    """Return the gradient norm, before clipping, of the step just taken; None if the loss scaler skipped it."""
    if engine.fp16_enabled() and not engine.was_step_applied():
        return None
    return float(engine.get_global_grad_norm())


def _gradient_norm(engine: Any) -> float:
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def accelerator_memory_bytes() -> int:
    """Return the peak memory on this rank's accelerator since the last call; on the CPU, that of the process."""
    accelerator = get_accelerator()
    peak = int(accelerator.max_memory_allocated())
    accelerator.reset_peak_memory_stats()
    return peak


def peak_host_memory_bytes() -> int:
    """Return the peak host memory of this rank so far. It may not include memory that a driver has pinned."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _engine(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, config: dict[str, Any]) -> Any:
    """Build an engine that holds the whole model."""
    model = (
        _partitioned_model(shape, pad_id, fill, config)
        if spec.layout.zero_stage == 3
        else _model(spec, shape, pad_id, fill)
    )
    if spec.model.activation_checkpointing:
        checkpoint_activations(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(spec, model), config=config)
    return engine


def _pipeline_engine(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, config: dict[str, Any]) -> Any:
    """Build an engine that holds one pipeline stage of the model."""
    from t5train.engine.pipeline_engine import PipelineEngine
    from t5train.model.pipeline_model import T5Pipeline

    model = T5Pipeline(shape, pad_id, spec.layout.pipeline_stages, geometry(spec.objective))
    names = huggingface_names(model, expert_rank=0)
    for name, parameter in model.named_parameters():
        fill(names[name], parameter)
    if spec.model.activation_checkpointing:
        checkpoint_activations(model)
    return PipelineEngine(model, _optimizer(spec, model), config, sums_of(model, spec))


def _model(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill) -> T5:
    size = spec.layout.expert_parallel_size
    model = T5(shape, decoder_start_id=pad_id, expert_parallel_size=size)
    names = huggingface_names(model, expert_rank(size))
    for name, parameter in model.named_parameters():
        fill(names[name], parameter)
    return model


def _partitioned_model(shape: T5Shape, pad_id: int, fill: Fill, config: dict[str, Any]) -> T5:
    """Build a model that no rank ever holds whole: each parameter is partitioned when created, and filled later."""
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = T5(shape, decoder_start_id=pad_id)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if rank() == 0:
                fill(name, parameter)
    return model


def _sum_over_ranks(values: Tensor, sharers: Any) -> None:
    """Sum in place, over a process group, or over all ranks if ``sharers`` is None.

    Values in host memory are copied to the accelerator, because its collectives cannot access host memory.
    """
    on_device = values.to(get_accelerator().current_device_name())
    comm.all_reduce(on_device, group=sharers)
    values.copy_(on_device)


def _optimizer(spec: RunSpec, model: nn.Module) -> AdamWRms:
    settings = spec.optimizer
    return AdamWRms(
        _parameter_groups(model),
        betas=settings.betas,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        relative=settings.kind == "adamw-rms",
        host_adam=HostAdam() if spec.layout.offload != "none" else None,
    )


def _parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group of the parameters that every rank has, and one for each set of experts that some ranks share."""
    everything = {"params": list(model.parameters()), "name": "dense"}
    groups: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(everything)
    return groups

"""Builds the DeepSpeed engine of a run.

A dense model is compiled as a whole. On NVIDIA GPUs its passes then run as CUDA graphs, because launching the kernels
one by one takes the host about as long as the GPU needs to run them.

A pipeline cannot be compiled as a whole, because its stages communicate outside any graph, nor can DeepSpeed's layer
with experts, because an expert's number of tokens is known only at run time. Blocks, or attention and feed-forward of
each block, are compiled one by one instead. They are all alike, so the code compiled for one is reused for all of its
kind. At ZeRO 3, they are compiled without the hooks that gather them (t5train.engine.gathered_blocks). The passes of a
pipeline stage then run as CUDA graphs, too (t5train.engine.pipeline_engine).
"""

import resource
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, cast

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from t5train.data.samples.span_corruption import geometry
from t5train.engine.collectives import expert_rank, rank, sum_over_ranks
from t5train.engine.deepspeed_config import deepspeed_config
from t5train.engine.gathered_blocks import GatheredBlocks
from t5train.engine.gradient_accumulation import sums_of
from t5train.engine.memory_estimate import records_passes
from t5train.engine.optimizer import AdamWRms, HostAdam
from t5train.engine.parameter_layout import huggingface_names
from t5train.engine.partitions import inner_optimizer, partitions_of, shared_by_stages
from t5train.model.activation_checkpointing import checkpoint_activations
from t5train.model.attention import KERNEL_HEAD_WIDTHS
from t5train.model.initialization import Fill, NoDefaultValues, fill_all, filled
from t5train.model.lora import add_adapters
from t5train.model.model_shape import T5Shape
from t5train.model.t5 import T5, Block
from t5train.spec import RunSpec

_HOPPER = 9  # major compute capability

if TYPE_CHECKING:
    from t5train.model.pipeline.pipeline_model import T5Pipeline


def compile_sublayers(model: nn.Module) -> None:
    """Compile attention and feed-forward of every block of ``model`` in place, except experts and their router."""
    for block in model.modules():
        if isinstance(block, Block):
            for step in block.layer[:-1] if block.is_sparse else block.layer:
                # The lengths of encoder and decoder differ; code for any length would be slower.
                step.compile(dynamic=False)


def compile_gathered(model: nn.Module, **settings: Any) -> None:
    """Compile every block of ``model`` in place, but not the hooks that gather its weights."""
    compiled = torch.compile(Block.forward, dynamic=False, **settings)
    for block in model.modules():
        if isinstance(block, Block):
            block.forward = MethodType(compiled, block)  # type: ignore[method-assign]  # of this block alone


def compile_blocks(model: nn.Module, **settings: Any) -> None:
    """Compile every block of ``model`` in place."""
    for block in model.modules():
        if isinstance(block, Block):
            block.compile(dynamic=False, **settings)


def build_engine(
    spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, node_local: bool, decays_all: bool = False
) -> Any:
    """Initialise model, optimizer and DeepSpeed. ``fill`` sets the same initial values on every rank.

    ``node_local``: the engine's checkpoints are on each node's own disk. ``decays_all``: weight decay also shrinks
    norms and position biases.
    """
    build = _pipeline_engine if spec.layout.pipeline_stages > 1 else _engine
    engine = build(spec, shape, pad_id, fill, deepspeed_config(spec, shape, node_local))
    partitions = (shared_by_stages if spec.layout.pipeline_stages > 1 else partitions_of)(engine, decays_all)
    inner_optimizer(engine).attach(partitions, sum_over_ranks if engine.zero_optimization() else None)
    if _can_fuse_update(engine):
        from t5train.engine.fused_update import FusedUpdate

        FusedUpdate(engine, inner_optimizer(engine), partitions).install()
    elif _can_fuse_parts(engine):
        from t5train.engine.partition_update import PartitionUpdate

        inner = inner_optimizer(engine)
        inner.use_kernels(PartitionUpdate(partitions, sum_over_ranks, inner.relative))
    elif spec.layout.offload != "none":
        _scale_where_needed(engine.optimizer)
    if spec.model.compile:
        _compile(engine, spec)
    return engine


def _scale_where_needed(optimizer: Any) -> None:
    """Let DeepSpeed clip gradients only where that changes them: in host memory, a factor of 1 is a costly pass."""
    scale = optimizer.unscale_and_clip_grads

    def scale_where_needed(gradients: Any, norm: torch.Tensor) -> None:
        is_within = (
            optimizer.clip_grad <= 0 or 0 <= float((norm / optimizer.loss_scale + 1e-6) / optimizer.clip_grad) <= 1
        )
        if optimizer.loss_scale != 1 or not is_within:
            scale(gradients, norm)

    optimizer.unscale_and_clip_grads = scale_where_needed


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
    if is_last:
        inner_optimizer(engine).measure_weights()
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
    """Return the peak memory of tensors on this rank's accelerator so far; on the CPU, that of the process.

    The peak is never reset. The allocator counts the activations of a CUDA graph only when the graph is recorded, in
    the first steps. A replay writes to the same memory without calling the allocator (see torch's cudagraph_trees), so
    a peak since a later moment would lack them.
    """
    return int(get_accelerator().max_memory_allocated())


def accelerator_reserved_bytes() -> int:
    """Return the peak memory that the allocator has taken from the accelerator so far, which includes unused parts."""
    return int(get_accelerator().max_memory_reserved() or 0)  # DeepSpeed returns None where torch cannot say


def peak_host_memory_bytes() -> int:
    """Return the peak host memory of this rank so far. It may not include memory that a driver has pinned."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _compile(engine: Any, spec: RunSpec) -> None:
    """Compile as much of the model at once as its layout allows."""
    model = model_of(engine)
    if records_passes(spec) and _can_fuse_update(engine):
        engine.record_passes()
    if spec.layout.zero_stage == 3:
        compile_gathered(model)
    elif spec.layout.pipeline_stages > 1 or any(layer.dispatch == "deepspeed" for _, layer in model.sparse_layers()):
        compile_sublayers(model)
    elif spec.model.moe.num_experts:
        compile_blocks(model, **_graphs(engine, spec))
    else:
        engine.compile(compile_kwargs=_graphs(engine, spec))


def _graphs(engine: Any, spec: RunSpec) -> dict[str, str]:
    """Return torch.compile's settings for CUDA graphs with the fused update, otherwise none.

    The next pass overwrites the gradients of the last one. They have been read before: by the fused update or their
    sums, or on several ranks by the copy into buckets. Ranks that divide experts communicate in a pass.
    """
    is_recordable = _can_fuse_update(engine) and spec.layout.expert_parallel_size == 1
    return {"mode": "reduce-overhead"} if is_recordable else {}


def _can_fuse_update(engine: Any) -> bool:
    """Return whether our update can replace DeepSpeed's: bf16 at ZeRO 1 or 2 on NVIDIA GPUs, without offload.

    Adapters are too small for it to matter.
    """
    is_supported = engine.bfloat16_enabled() and engine.zero_optimization_stage() in {1, 2}
    is_whole = all(each.requires_grad for each in engine.module.parameters())
    return is_supported and is_whole and not engine.optimizer.cpu_offload and _has_kernels()


def _can_fuse_parts(engine: Any) -> bool:
    """Return whether our kernels can update what DeepSpeed passes to the optimizer: at ZeRO 3, without offload."""
    return engine.zero_optimization_stage() == 3 and not engine.optimizer.offload_optimizer and _has_kernels()


def _use_kernels(model: "T5 | T5Pipeline", spec: RunSpec, shape: T5Shape) -> None:
    """Let the model train with our kernels where they can replace torch's: in 16 bits, on NVIDIA GPUs.

    Attention with heads of another width stays torch's, and on text with dropout, whose masks a generator draws.
    """
    if spec.optimizer.precision == "fp32" or not _has_kernels():
        return
    from t5train.model.kernels import biased_attention, gated_gelu

    gated_gelu.use_in(model)
    for _, layer in model.sparse_layers():
        layer.dispatch = _dispatch(spec, shape, biased_attention.capability())
    if shape.d_kv in KERNEL_HEAD_WIDTHS and (shape.dropout_rate == 0 or spec.is_fine_tuning):
        biased_attention.use_in(model)


def _dispatch(spec: RunSpec, shape: T5Shape, capability: int) -> Literal["deepspeed", "rows", "slots"]:
    """Return how tokens get to their experts in training.

    Grouped products of rows need bf16, all experts on every rank, rows of 16 bytes, and a Hopper GPU: before it, torch
    waits for the GPU in each; after it, gradients of experts without tokens may be wrong.
    """
    is_whole_in_bf16 = spec.optimizer.precision == "bf16" and spec.layout.expert_parallel_size == 1
    if is_whole_in_bf16 and shape.d_model % 8 == 0 and shape.d_ff % 8 == 0 and capability // 10 == _HOPPER:
        return "rows"
    return "deepspeed" if spec.model.moe.capacity_factor is None else "slots"


def _has_kernels() -> bool:
    """Return whether Triton's kernels run here: on NVIDIA GPUs, where torch installs Triton, from Ampere on.

    Before it (V100, T4), Triton's matrix products are slower than torch's.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return bool(accelerator.is_triton_supported())


def _engine(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, config: dict[str, Any]) -> Any:
    """Build an engine that holds the whole model."""
    model = (
        _partitioned_model(spec, shape, pad_id, fill, config)
        if spec.layout.zero_stage == 3
        else _model(spec, shape, pad_id, fill)
    )
    model.label_smoothing, model.z_loss = spec.optimizer.label_smoothing, spec.optimizer.z_loss
    _use_kernels(model, spec, shape)
    if spec.model.activation_checkpointing:
        checkpoint_activations(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(spec, model), config=config)
    if spec.layout.zero_stage == 3:
        GatheredBlocks(engine)
    return engine


def _pipeline_engine(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, config: dict[str, Any]) -> Any:
    """Build an engine that holds one pipeline stage of the model."""
    from t5train.engine.pipeline_engine import PipelineEngine
    from t5train.model.pipeline.pipeline_model import T5Pipeline

    with NoDefaultValues():
        model = T5Pipeline(shape, pad_id, spec.layout.pipeline_stages, geometry(spec.objective))
    names = huggingface_names(model, expert_rank=0)
    fill_all({names[name]: parameter for name, parameter in model.named_parameters()}, fill)
    _use_kernels(model, spec, shape)
    if spec.model.activation_checkpointing:
        checkpoint_activations(model)
    return PipelineEngine(model, _optimizer(spec, model), config, sums_of(model, spec))


def _model(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill) -> T5:
    size = spec.layout.expert_parallel_size
    with NoDefaultValues():
        model = T5(shape, decoder_start_id=pad_id, expert_parallel_size=size)
        add_adapters(model, spec.finetune.lora)
    names = huggingface_names(model, expert_rank(size))
    fill_all({names[name]: parameter for name, parameter in model.named_parameters()}, fill)
    return model


def _partitioned_model(spec: RunSpec, shape: T5Shape, pad_id: int, fill: Fill, config: dict[str, Any]) -> T5:
    """Build a model that no rank ever holds whole: each parameter is partitioned when created, and filled later."""
    with NoDefaultValues(), deepspeed.zero.Init(config_dict_or_path=config):
        model = T5(shape, decoder_start_id=pad_id)
        add_adapters(model, spec.finetune.lora)
    names, parameters = huggingface_names(model, expert_rank=0), dict[str, Any](model.named_parameters())
    values = filled({names[name]: each.ds_shape for name, each in parameters.items()}, fill)
    for parameter in parameters.values():
        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if rank() == 0:
                parameter.copy_(next(values))
    return model


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
    everything = {"params": [each for each in model.parameters() if each.requires_grad], "name": "dense"}
    groups: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(everything)
    return groups

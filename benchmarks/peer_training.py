"""Trains a peer of this project for some steps: plain PyTorch, or DeepSpeed's engine; see benchmarks/training_peers.py.

It is also the program of the peer's ranks. What they share with Hugging Face's Trainer, the third peer, is in
``t5train.train.trainer_benchmark``.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t5train.spec import RunSpec
from t5train.train.step_benchmark import WARM_UP_STEPS
from t5train.train.trainer_benchmark import (
    LEARNING_RATE,
    MeasuredSteps,
    StepTimes,
    TrainerJob,
    drawn_batches,
    huggingface_model,
    run_rank,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

Peer = Literal["pytorch", "pytorch tuned", "deepspeed"]
PROGRAM = "benchmarks.peer_training"
Step = Callable[[], float]
"""Takes an optimizer step and returns the loss of its last pass."""


class PeerJob(TrainerJob):
    """What to train, with which peer."""

    peer: Peer
    attention: str | None = None
    """An implementation of attention in transformers; None for its default."""


def measure(text: str, _folder: Path) -> MeasuredSteps:
    """Take the steps of a job, given as JSON. A collective of all ranks."""
    job, times, losses = PeerJob.model_validate_json(text), StepTimes(), []
    has_16_bit_weights = job.is_bf16 and job.peer == "deepspeed"
    model = huggingface_model(job, has_16_bit_weights=has_16_bit_weights, attention=job.attention)
    step = _deepspeed_step(job, model) if job.peer == "deepspeed" else _pytorch_step(job, model)
    for _ in range(WARM_UP_STEPS + job.steps):
        losses.append(step())
        times.step_ended()
    bf16 = "bf16 weights, fp32 masters" if has_16_bit_weights else "fp32 weights, bf16 autocast"
    return times.measured(model, losses, bf16 if job.is_bf16 else "fp32")


def _on_device(job: PeerJob) -> "Iterator[dict[str, Tensor]]":
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    return cycle([{name: ids.to(device) for name, ids in batch.items()} for batch in drawn_batches(job)])


def _pytorch_step(job: PeerJob, model: "nn.Module") -> Step:
    """Return a step of plain PyTorch: compiled, fp32 weights under autocast, fused AdamW; DDP on several ranks."""
    import torch
    from deepspeed.accelerator import get_accelerator

    passes, clip, batches = job.spec.gradient_accumulation, job.spec.optimizer.gradient_clip, _on_device(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    replica = _replicated(job, model)
    _leave_experts_uncompiled(model)
    forward = torch.compile(replica or model, dynamic=False)
    device = get_accelerator().device_name()

    def step() -> float:
        loss = torch.zeros(())
        for number, batch in enumerate(islice(batches, passes)):
            with replica.no_sync() if replica and number < passes - 1 else nullcontext():
                with torch.autocast(device, torch.bfloat16, enabled=job.is_bf16):
                    loss = forward(**batch).loss
                (loss / passes).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _replicated(job: PeerJob, model: "nn.Module") -> "nn.parallel.DistributedDataParallel | None":
    """Wrap the model for data parallelism; None on a single rank."""
    from deepspeed.accelerator import get_accelerator
    from torch import distributed, nn

    if int(os.environ["WORLD_SIZE"]) == 1:
        return None
    distributed.init_process_group(get_accelerator().communication_backend_name())
    return nn.parallel.DistributedDataParallel(
        model,
        gradient_as_bucket_view=job.peer == "pytorch tuned",
        find_unused_parameters=job.spec.model.moe.num_experts > 0,  # an expert may get no tokens
    )


def _deepspeed_step(job: PeerJob, model: "nn.Module") -> Step:
    """Return a step of DeepSpeed's engine, compiled unless it partitions parameters, which compiled code cannot see."""
    import deepspeed
    import torch

    passes, batches = job.spec.gradient_accumulation, _on_device(job)
    config = _deepspeed_config(job.spec)
    # DeepSpeed makes the optimizer itself only where it must be one for host memory.
    own = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    _leave_experts_uncompiled(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
    if job.spec.layout.zero_stage < 3:
        engine.compile(compile_kwargs={"dynamic": False})

    def step() -> float:
        loss = torch.zeros(())
        for batch in islice(batches, passes):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return step


def _deepspeed_config(spec: RunSpec) -> dict[str, Any]:
    host_memory = {"device": "cpu", "pin_memory": spec.layout.pin_memory}
    offloads = spec.layout.offload != "none"
    return {
        "train_batch_size": spec.optimizer.global_batch_sequences,
        "train_micro_batch_size_per_gpu": spec.layout.micro_batch_sequences,
        "gradient_accumulation_steps": spec.gradient_accumulation,
        "gradient_clipping": spec.optimizer.gradient_clip,
        "zero_optimization": {
            "stage": spec.layout.zero_stage,
            "overlap_comm": spec.cluster.ranks > 1,
            **({"offload_optimizer": host_memory} if offloads else {}),
            **({"offload_param": host_memory} if spec.layout.offload == "all" else {}),
        },
        "bf16": {"enabled": spec.optimizer.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 60,
        **({"optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}}} if offloads else {}),
    }


def _leave_experts_uncompiled(model: "nn.Module") -> None:
    """Exclude sparse layers from compilation: which experts their loop visits depends on the data."""
    import torch
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    for module in model.modules():
        if isinstance(module, SwitchTransformersSparseMLP):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]  # torch does not annotate it


if __name__ == "__main__":
    sys.exit(run_rank(measure))

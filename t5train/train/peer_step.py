"""Trains one peer of this project for some steps: the program of the ranks that ``infra.head.peer_ranks`` starts.

Every peer trains Hugging Face's T5 (with experts, its Switch Transformer) of a recipe's shape on random tokens, in the
recipe's global batch. The settings that only cost a peer time are off: it caches no keys and values, gets no attention
mask, and Switch Transformers add no router losses. Rank 0 writes the result beside the job.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn

from t5train.engine.engine import accelerator_memory_bytes, accelerator_reserved_bytes, peak_host_memory_bytes
from t5train.files.atomic import write_json
from t5train.model.model_shape import count_parameters, huggingface_config, resolve
from t5train.spec import RunSpec
from t5train.train.peer_job import OUT_OF_MEMORY, PeerJob, PeerMeasured
from t5train.train.step_benchmark import WARM_UP_STEPS, BenchmarkJob, random_batch

LEARNING_RATE = 1e-4
_BATCHES = 4
Step = Callable[[], float]
"""Takes an optimizer step and returns the loss of its last pass."""


class StepTimes:
    """Wall time from the end of one step to the end of the next, with the accelerator's work done at both."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._warm_up, self._ended = WARM_UP_STEPS, 0.0

    def step_ended(self) -> None:
        """Call this after every step. Steps of the warm-up do not count."""
        get_accelerator().synchronize()
        now = time.perf_counter()
        if self._warm_up:
            self._warm_up -= 1
        else:
            self.seconds.append(now - self._ended)
        self._ended = time.perf_counter()


def main() -> int:
    """Train, and write ``measured.json`` beside the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="JSON file of a PeerJob")
    path = parser.parse_args().job
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    try:
        measured = measure(PeerJob.model_validate_json(path.read_text("utf-8")), path.parent)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)  # an orderly exit would wait for the other ranks
    if os.environ["RANK"] == "0":
        write_json(path.with_name("measured.json"), measured.model_dump())
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


def measure(job: PeerJob, folder: Path) -> PeerMeasured:
    """Take the steps. A collective of all ranks. ``folder`` is for files that a peer writes."""
    torch.manual_seed(0)
    times, model = StepTimes(), _model(job)
    if job.peer == "trainer":
        losses = _train_with_trainer(job, model, times, folder)
    else:
        step = _deepspeed_step(job, model) if job.peer == "deepspeed" else _pytorch_step(job, model)
        losses = []
        for _ in range(WARM_UP_STEPS + job.steps):
            losses.append(step())
            times.step_ended()
    return PeerMeasured(
        step_seconds=times.seconds,
        memory_bytes=accelerator_memory_bytes(),
        reserved_bytes=accelerator_reserved_bytes(),
        host_memory_bytes=peak_host_memory_bytes(),
        attention=str(model.config._attn_implementation),
        precision=_precision(job),
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def model_class(spec: RunSpec) -> Any:
    """Return the class in transformers of a recipe's model."""
    from transformers import SwitchTransformersForConditionalGeneration, T5ForConditionalGeneration

    return SwitchTransformersForConditionalGeneration if spec.model.moe.num_experts else T5ForConditionalGeneration


def _model(job: PeerJob) -> Any:
    shape = resolve(job.spec.model, job.vocab_size)
    settings = huggingface_config(shape, pad_id=0, eos_id=1) | {"use_cache": False}
    if job.attention:
        settings["attn_implementation"] = job.attention
    if _has_16_bit_weights(job) and shape.moe.num_experts:
        # Otherwise the router replaces its weights by fp32 ones, which DeepSpeed's flat buffers do not hold.
        settings["router_dtype"] = "bfloat16"
    made = model_class(job.spec)
    with torch.device(get_accelerator().current_device_name()):
        model = made(made.config_class(**settings))
    if not shape.tied:
        _untie(model)
    if job.spec.model.activation_checkpointing:
        model.gradient_checkpointing_enable()
    found, wanted = sum(parameter.numel() for parameter in model.parameters()), count_parameters(shape)
    if found != wanted:
        raise ValueError(f"the peer has {found:,} parameters, and the recipe {wanted:,}")
    return model.train()


def _untie(model: Any) -> None:
    """Give the output its own weights. transformers 5 ties those of every T5 that it does not load, v1.1 too."""
    own = torch.empty_like(model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(nn.init.normal_(own, std=model.config.d_model**-0.5))
    model.config.tie_word_embeddings = False


def _is_bf16(job: PeerJob) -> bool:
    return job.spec.optimizer.precision == "bf16"


def _has_16_bit_weights(job: PeerJob) -> bool:
    return _is_bf16(job) and job.peer in {"trainer", "deepspeed"}


def _precision(job: PeerJob) -> str:
    if not _is_bf16(job):
        return "fp32"
    return "bf16 weights, fp32 masters" if _has_16_bit_weights(job) else "fp32 weights, bf16 autocast"


def _drawn(job: PeerJob) -> list[dict[str, Tensor]]:
    """Return this rank's micro-batches, in host memory, drawn as those of this project's own benchmark."""
    own = BenchmarkJob(spec=job.spec, vocab_size=job.vocab_size, steps=job.steps)
    first = int(os.environ["RANK"]) * _BATCHES
    batches = [random_batch(own, seed=first + number) for number in range(_BATCHES)]
    return [
        {"input_ids": torch.from_numpy(batch.inputs).long(), "labels": torch.from_numpy(batch.targets).long()}
        for batch in batches
    ]


def _on_device(job: PeerJob) -> Iterator[dict[str, Tensor]]:
    device = get_accelerator().current_device_name()
    return cycle([{name: ids.to(device) for name, ids in batch.items()} for batch in _drawn(job)])


def _pytorch_step(job: PeerJob, model: nn.Module) -> Step:
    """Return a step of plain PyTorch: compiled, fp32 weights under autocast, fused AdamW; DDP on several ranks."""
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
                with torch.autocast(device, torch.bfloat16, enabled=_is_bf16(job)):
                    loss = forward(**batch).loss
                (loss / passes).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _replicated(job: PeerJob, model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Wrap the model for data parallelism; None on a single rank."""
    if int(os.environ["WORLD_SIZE"]) == 1:
        return None
    distributed.init_process_group(get_accelerator().communication_backend_name())
    return nn.parallel.DistributedDataParallel(
        model,
        gradient_as_bucket_view=job.peer == "pytorch tuned",
        find_unused_parameters=job.spec.model.moe.num_experts > 0,  # an expert may get no tokens
    )


def _deepspeed_step(job: PeerJob, model: nn.Module) -> Step:
    """Return a step of DeepSpeed's engine, compiled unless it partitions parameters, which compiled code cannot see."""
    import deepspeed

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


def _leave_experts_uncompiled(model: nn.Module) -> None:
    """Exclude sparse layers from compilation: which experts their loop visits depends on the data."""
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    for module in model.modules():
        if isinstance(module, SwitchTransformersSparseMLP):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]


def _train_with_trainer(job: PeerJob, model: nn.Module, times: StepTimes, folder: Path) -> list[float]:
    """Train with Hugging Face's Trainer as its documentation shows, logging every step. Return the logged losses.

    With several passes a step, or several ranks, the Trainer multiplies them by the number of these.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.step_ended()

    spec = job.spec
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=spec.layout.micro_batch_sequences,
        gradient_accumulation_steps=spec.gradient_accumulation,
        max_steps=WARM_UP_STEPS + job.steps,
        learning_rate=LEARNING_RATE,
        max_grad_norm=spec.optimizer.gradient_clip,
        bf16=_is_bf16(job),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=get_accelerator().device_name() == "cpu",
        deepspeed=_trainer_deepspeed_config(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_dataset(job), callbacks=[Callback()])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _trainer_deepspeed_config() -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }


def _dataset(job: PeerJob) -> list[dict[str, Tensor]]:
    """Return the drawn samples as a dataset with enough of them for all steps of all ranks."""
    rows = [
        {"input_ids": inputs, "labels": labels}
        for batch in _drawn(job)
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    needed = (WARM_UP_STEPS + job.steps) * job.spec.optimizer.global_batch_sequences
    return list(islice(cycle(rows), needed))


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


if __name__ == "__main__":
    sys.exit(main())

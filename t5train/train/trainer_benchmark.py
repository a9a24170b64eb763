"""Measures steps of Hugging Face's Trainer: the program of the ranks that ``t5-pretrain bench`` compares with its own.

They train Hugging Face's T5 (with experts, its Switch Transformer) of a recipe's shape on random tokens, in the
recipe's global batch. The settings that only cost time are off: no keys and values are cached, there is no attention
mask, and Switch Transformers add no router losses. Rank 0 writes the result beside the job.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from t5train.files.atomic import write_json
from t5train.model.model_shape import count_parameters, huggingface_config, resolve
from t5train.spec import RunSpec
from t5train.train.step_benchmark import WARM_UP_STEPS, BenchmarkJob, random_batch

if TYPE_CHECKING:
    from torch import Tensor, nn

LEARNING_RATE = 1e-4
OUT_OF_MEMORY = 75
"""Exit code of a rank that ran out of memory."""
ZERO_2: dict[str, Any] = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
"""DeepSpeed's configuration for trainers of Hugging Face; they fill in what is auto."""
_BATCHES = 4


class TrainerJob(BaseModel):
    """What to train, and for how many steps after warm-up."""

    spec: RunSpec
    vocab_size: int
    steps: int

    @property
    def is_bf16(self) -> bool:
        """Whether it trains in bf16, not in fp32."""
        return self.spec.optimizer.precision == "bf16"


class MeasuredSteps(BaseModel):
    """The result of rank 0."""

    step_seconds: list[float]
    memory_bytes: int
    reserved_bytes: int
    host_memory_bytes: int
    attention: str
    precision: str
    first_loss: float
    last_loss: float


class StepTimes:
    """Wall time from the end of one step to the end of the next, with the accelerator's work done at both."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._warm_up, self._ended = WARM_UP_STEPS, 0.0

    def step_ended(self) -> None:
        """Call this after every step. Steps of the warm-up do not count."""
        from deepspeed.accelerator import get_accelerator

        get_accelerator().synchronize()
        now = time.perf_counter()
        if self._warm_up:
            self._warm_up -= 1
        else:
            self.seconds.append(now - self._ended)
        self._ended = time.perf_counter()

    def measured(self, model: Any, losses: Sequence[float], precision: str) -> MeasuredSteps:
        """Return the result of this rank."""
        from t5train.engine.engine import accelerator_memory_bytes, accelerator_reserved_bytes, peak_host_memory_bytes

        return MeasuredSteps(
            step_seconds=self.seconds,
            memory_bytes=accelerator_memory_bytes(),
            reserved_bytes=accelerator_reserved_bytes(),
            host_memory_bytes=peak_host_memory_bytes(),
            attention=str(model.config._attn_implementation),
            precision=precision,
            first_loss=losses[0],
            last_loss=losses[-1],
        )


def run_rank(measure: Callable[[str, Path], MeasuredSteps]) -> int:
    """Measure as one rank, and write ``measured.json`` beside the job, whose file is the command's argument.

    ``measure`` gets the job as JSON, and a folder for files that it writes.
    """
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch import distributed

    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON file of a job")
    path = parser.parse_args().job
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    try:
        measured = measure(path.read_text("utf-8"), path.parent)
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


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def model_class(spec: RunSpec) -> Any:
    """Return the class in transformers of a recipe's model."""
    from transformers import SwitchTransformersForConditionalGeneration, T5ForConditionalGeneration

    return SwitchTransformersForConditionalGeneration if spec.model.moe.num_experts else T5ForConditionalGeneration


def huggingface_model(job: TrainerJob, *, has_16_bit_weights: bool, attention: str | None = None) -> Any:
    """Return Hugging Face's model of the recipe's shape, on this rank's device.

    ``attention`` is an implementation of attention in transformers; None for its default.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    shape = resolve(job.spec.model, job.vocab_size)
    settings = huggingface_config(shape, pad_id=0, eos_id=1) | {"use_cache": False}
    if attention:
        settings["attn_implementation"] = attention
    if has_16_bit_weights and shape.moe.num_experts:
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
        raise ValueError(f"Hugging Face's model has {found:,} parameters, and the recipe {wanted:,}")
    return model.train()


def _untie(model: Any) -> None:
    """Give the output its own weights. transformers 5 ties those of every T5 that it does not load, v1.1 too."""
    import torch
    from torch import nn

    own = torch.empty_like(model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(nn.init.normal_(own, std=model.config.d_model**-0.5))
    model.config.tie_word_embeddings = False


def drawn_batches(job: TrainerJob) -> "list[dict[str, Tensor]]":
    """Return this rank's micro-batches, in host memory, drawn as those of this project's own benchmark."""
    import torch

    own = BenchmarkJob(spec=job.spec, vocab_size=job.vocab_size, steps=job.steps)
    first = int(os.environ["RANK"]) * _BATCHES
    batches = [random_batch(own, seed=first + number) for number in range(_BATCHES)]
    return [
        {"input_ids": torch.from_numpy(batch.inputs).long(), "labels": torch.from_numpy(batch.targets).long()}
        for batch in batches
    ]


def measure(text: str, folder: Path) -> MeasuredSteps:
    """Take the steps of a job, given as JSON. A collective of all ranks."""
    job, times = TrainerJob.model_validate_json(text), StepTimes()
    model = huggingface_model(job, has_16_bit_weights=job.is_bf16)
    losses = _train(job, model, times, folder)
    return times.measured(model, losses, "bf16 weights, fp32 masters" if job.is_bf16 else "fp32")


def _train(job: TrainerJob, model: "nn.Module", times: StepTimes, folder: Path) -> list[float]:
    """Train with Hugging Face's Trainer as its documentation shows, logging every step. Return the logged losses.

    With several passes a step, or several ranks, the Trainer multiplies them by the number of these.
    """
    from deepspeed.accelerator import get_accelerator
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Callback(TrainerCallback):  # type: ignore[misc]  # transformers loads it lazily, so it has no type
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
        bf16=job.is_bf16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=get_accelerator().device_name() == "cpu",
        deepspeed=ZERO_2,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_dataset(job), callbacks=[Callback()])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _dataset(job: TrainerJob) -> "list[dict[str, Tensor]]":
    """Return the drawn samples as a dataset with enough of them for all steps of all ranks."""
    rows = [
        {"input_ids": inputs, "labels": labels}
        for batch in drawn_batches(job)
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    needed = (WARM_UP_STEPS + job.steps) * job.spec.optimizer.global_batch_sequences
    return list(islice(cycle(rows), needed))


if __name__ == "__main__":
    sys.exit(run_rank(measure))

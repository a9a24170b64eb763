"""Measures steps of Hugging Face's Seq2SeqTrainer on pairs: the program of benchmarks/pair_training.py's rank."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from t5train.data.pairs.pair_shard_worker import LENGTHS
from t5train.data.pairs.pair_shards import shard_file
from t5train.host_resources import num_cores
from t5train.records.stage_records import PairShards
from t5train.train.learning_rate import learning_rate
from t5train.train.step_benchmark import WARM_UP_STEPS
from t5train.train.trainer_benchmark import ZERO_2, MeasuredSteps, StepTimes, TrainerJob, run_rank

if TYPE_CHECKING:
    from torch import Tensor

PROGRAM = "benchmarks.pair_trainer"
_SEQUENCES = 8
"""Whose logits are read at a time, so that their copies in fp32 take little memory."""
_MULTIPLE, _IGNORED = 8, -100
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>"}


class PairTrainerJob(TrainerJob):
    """What to train on: the pairs of these shards, in batches of a number of pairs."""

    shards: Path
    tokenizer_file: Path
    pairs_a_pass: int
    passes: int


class MeasuredOnPairs(MeasuredSteps):
    """The result, with what the batch of each step held; the first steps are those of the warm-up."""

    losses: list[float]
    """Mean over the target tokens of the step, computed in fp32."""
    real_tokens: list[int]
    row_tokens: list[int]
    """With padding."""
    pairs: list[int]


class _Step(NamedTuple):
    """What the passes of a step have added up."""

    loss: float = 0.0
    targets: int = 0
    real_tokens: int = 0
    row_tokens: int = 0
    pairs: int = 0
    seconds: float = 0.0
    """What counting all this took."""

    def plus(self, other: "_Step") -> "_Step":
        return _Step(*(mine + more for mine, more in zip(self, other, strict=True)))


def examples(shards: PairShards) -> list[dict[str, list[int]]]:
    """Return the pairs to train on, with the ids, cut and EOS that this project's rows hold."""
    lengths = np.fromfile(shards.path / shard_file("train", 0, "lengths"), LENGTHS).astype(np.int64)
    file = shards.path / shard_file("train", 0, "tokens")
    tokens = np.fromfile(file, f"<u{shards.counts['bytes_per_token']}")
    texts = [text.tolist() for text in np.split(tokens, np.cumsum(lengths)[:-1])]
    return [{"input_ids": one, "labels": other} for one, other in zip(texts[::2], texts[1::2], strict=True)]


def measure(text: str, folder: Path) -> MeasuredOnPairs:
    """Take the steps of a job, given as JSON, of a single rank."""
    import torch
    from transformers import T5ForConditionalGeneration

    job, times, steps = PairTrainerJob.model_validate_json(text), StepTimes(), list[_Step]()
    model = T5ForConditionalGeneration.from_pretrained(job.spec.model.start_from, dtype=torch.float32)
    model.config.use_cache = False
    _train(job, model, times, steps, folder)
    losses = [each.loss / each.targets for each in steps]
    measured = times.measured(model, losses, "bf16 weights, fp32 masters" if job.is_bf16 else "fp32").model_dump()
    counting = [each.seconds for each in steps[WARM_UP_STEPS:]]
    measured["step_seconds"] = [all_of_it - own for all_of_it, own in zip(times.seconds, counting, strict=True)]
    return MeasuredOnPairs(
        **measured,
        losses=losses,
        real_tokens=[each.real_tokens for each in steps],
        row_tokens=[each.row_tokens for each in steps],
        pairs=[each.pairs for each in steps],
    )


def _train(job: PairTrainerJob, model: Any, times: StepTimes, steps: list[_Step], folder: Path) -> None:
    """Train as the documentation of transformers shows for translation, with DeepSpeed and length grouping."""
    from transformers import (
        DataCollatorForSeq2Seq,
        PreTrainedTokenizerFast,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    passes = list[_Step]()

    class Counting(Seq2SeqTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            passes.append(_counted(inputs, outputs.logits))
            return (loss, outputs) if return_outputs else loss

    class Callback(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.step_ended()
            step = _Step()
            while passes:
                step = step.plus(passes.pop())
            steps.append(step)

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(job.tokenizer_file), **_SPECIAL)
    Counting(
        model=model,
        args=Seq2SeqTrainingArguments(output_dir=str(folder / "trainer"), **_arguments(job)),
        train_dataset=examples(PairShards.load(job.shards)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=_MULTIPLE),
        callbacks=[Callback()],
    ).train()


def _arguments(job: PairTrainerJob) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    optimizer = job.spec.optimizer
    (beta1, beta2), rate = optimizer.betas, learning_rate(optimizer, 1)
    return {
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": job.pairs_a_pass,
        "gradient_accumulation_steps": job.passes,
        "max_steps": WARM_UP_STEPS + job.steps,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.gradient_clip,
        "bf16": job.is_bf16,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": num_cores() // 4,
        "use_cpu": get_accelerator().device_name() == "cpu",
        "deepspeed": ZERO_2,
    }


def _counted(inputs: "dict[str, Tensor]", logits: "Tensor") -> _Step:
    """Return what a pass is about. Its loss is added up in fp32, as the model's own is rounded to its 16 bits."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.nn import functional

    get_accelerator().synchronize()
    started = time.perf_counter()
    labels, mask = inputs["labels"], inputs["attention_mask"]
    with torch.no_grad():
        parts = zip(logits.split(_SEQUENCES), labels.split(_SEQUENCES), strict=True)
        losses = [functional.cross_entropy(*_flat(*part), ignore_index=_IGNORED, reduction="sum") for part in parts]
        loss, targets = float(torch.stack(losses).sum()), int((labels != _IGNORED).sum())
    real = targets + int(mask.sum())
    seconds = time.perf_counter() - started
    return _Step(loss, targets, real, labels.numel() + mask.numel(), len(labels), seconds)


def _flat(logits: "Tensor", labels: "Tensor") -> "Sequence[Tensor]":
    return logits.flatten(0, 1).float(), labels.flatten()


if __name__ == "__main__":
    sys.exit(run_rank(measure))

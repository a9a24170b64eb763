"""Compare the gradient of a step on pairs with the true one: Hugging Face's Seq2SeqTrainer beside this project.

    python -m benchmarks.pair_gradients [--layouts 1x1 1x2 2x1 1x4 2x2 2x4]

The true gradient is that of the mean loss of all target tokens of the batch, computed by Hugging Face's model from one
pair at a time. A layout is the number of ranks, and of passes of each. The same 32 pairs of uneven lengths are the
batch in every layout; the Trainer pads them, and this project packs two into a row. On the CPU, in fp32, with a small
random model without dropout. Needs accelerate, which is in the extra dev.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from benchmarks.measured_result import add_into, measured_here
from tests.support.training.ragged_pairs import EOS, PAD, SEED, UNUSED, VOCABULARY, Pair, batch_of

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("1x1", "1x2", "2x1", "1x4", "2x2", "2x4")
PAIRS, LONGEST = 32, 48
SETTINGS: dict[str, Any] = {
    "pairs.train": ["pairs.jsonl"],
    "cluster.accelerator": "cpu",
    "model.version": "v1.0",
    "model.feed_forward": "gated-gelu",
    "optimizer.precision": "fp32",
    "optimizer.gradient_clip": 0,
    "optimizer.global_batch_sequences": PAIRS // 2,
    "layout.zero_stage": 1,
}
OURS, THEIRS = "t5-pretrain", "Seq2SeqTrainer"


def main() -> int:
    """Compute the gradients in every layout, and print the table; or compute one, as one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="ranks x passes")
    parser.add_argument("--program", choices=(OURS, THEIRS), help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    add_into(parser)
    given = parser.parse_args()
    if given.program:
        _compute(given.program, int(given.layouts[0].split("x")[1]), given.found)
        return 0
    if find_spec("accelerate") is None:
        print("Seq2SeqTrainer needs accelerate: install it, or add a folder that has it to PYTHONPATH", file=sys.stderr)
        return 1
    rows = [
        {"ranks x passes": layout, **_columns(THEIRS, _run(THEIRS, layout)), **_columns(OURS, _run(OURS, layout))}
        for layout in given.layouts
    ]
    from accelerate import __version__ as of_accelerate
    from transformers import __version__ as of_transformers

    notes = f"transformers {of_transformers}, accelerate {of_accelerate}; {PAIRS} pairs, fp32, no clipping."
    measured_here("Gradient of a step on pairs, relative to the true one", rows, notes).show(given.into)
    return 0


def _columns(program: str, found: dict[str, float]) -> dict[str, float]:
    return {f"{program}: {name}": round(value, 6) for name, value in found.items()}


def _run(program: str, layout: str) -> dict[str, float]:
    """Run a program on the ranks of a layout, and return what rank 0 found."""
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", layout.split("x", maxsplit=1)[0]]
        ours = ["-m", "benchmarks.pair_gradients", "--layouts", layout, "--program", program, "--found", str(found)]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *ranks, *ours], check=True, env=environment)
        columns: dict[str, float] = json.loads(found.read_text("utf-8"))
        return columns


def _compute(program: str, passes: int, into: Path) -> None:
    """Compute a step's gradient as one of the ranks; rank 0 writes how it compares with the true one."""
    import torch

    compute = _with_trainer if program == THEIRS else _with_engine
    gradients, loss = compute(_pairs(), passes)
    if int(os.environ["RANK"]) == 0:
        true_gradients, true_loss = _true(_pairs())
        found, expected = (
            torch.cat([each[name].flatten().double() for name in sorted(true_gradients)])
            for each in (gradients, true_gradients)
        )
        columns = {
            "norm / true": float(found.norm() / expected.norm()),
            "cosine": float(found @ expected / found.norm() / expected.norm()),
            "loss / true": loss / true_loss,
        }
        into.write_text(json.dumps(columns), "utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _pairs() -> list[Pair]:
    """Pairs whose lengths vary as those of messages do: from 2 tokens on, with many short ones."""
    generator = np.random.default_rng(1)
    lengths = np.exp(generator.uniform(np.log(2), np.log(LONGEST), (PAIRS, 2))).astype(int)
    return [Pair(*(np.append(generator.integers(3, UNUSED[0], n - 1), EOS) for n in both)) for both in lengths]


def _shape(spec: Any) -> Any:
    from t5train.model.model_shape import resolve

    return resolve(spec.model, VOCABULARY)


def _spec(passes: int) -> Any:
    from t5train.spec.recipes import recipe

    ranks = int(os.environ["WORLD_SIZE"])
    own = {"cluster.ranks": ranks, "layout.micro_batch_sequences": PAIRS // 2 // ranks // passes}
    return recipe("smoke").with_settings(SETTINGS | own)


def _huggingface_model() -> Any:
    """Return Hugging Face's model with the weights that this project draws."""
    from transformers import T5Config, T5ForConditionalGeneration

    from t5train.model.initialization import initialise
    from t5train.model.model_shape import huggingface_config

    shape = _shape(_spec(1))
    model = T5ForConditionalGeneration(T5Config(**huggingface_config(shape, pad_id=PAD, eos_id=EOS)))
    for name, parameter in model.named_parameters():
        initialise(name, parameter, shape, seed=SEED)
    return model.train()


def _true(pairs: Sequence[Pair]) -> "tuple[dict[str, Tensor], float]":
    """Return gradients and value of the mean loss of all target tokens, computed from one pair at a time."""
    import torch

    model, total = _huggingface_model(), 0.0
    for pair in pairs:
        source, target = (torch.from_numpy(side).long().unsqueeze(0) for side in pair)
        loss = model(input_ids=source, labels=target).loss * target.numel() / sum(len(each.target) for each in pairs)
        loss.backward()
        total += float(loss.detach())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, total


def _with_engine(pairs: Sequence[Pair], passes: int) -> "tuple[dict[str, Tensor], float]":
    """Return the gradients and the loss of a step of this project's engine."""
    from functools import partial

    import deepspeed
    from deepspeed import comm
    from deepspeed.utils import safe_get_full_grad

    from t5train.engine import forward_backward
    from t5train.engine.collectives import gather_floats
    from t5train.engine.engine import build_engine, model_of
    from t5train.engine.expert_routing import Routing
    from t5train.model.initialization import initialise

    deepspeed.init_distributed("gloo", verbose=False)
    spec = _spec(passes)
    shape, size, ranks = _shape(spec), spec.layout.micro_batch_sequences, spec.cluster.ranks
    engine = build_engine(spec, shape, PAD, partial(initialise, shape=shape, seed=SEED), node_local=False)
    rows = [(number, number + 1) for number in range(0, PAIRS, 2)]
    targets = sum(len(pair.target) for pair in pairs)
    mine = [rows[size * (ranks * number + comm.get_rank()) :][:size] for number in range(passes)]
    batches = [batch_of(held, pairs, (2 * LONGEST, 2 * LONGEST), global_targets=targets) for held in mine]
    gradients: dict[str, Tensor] = {}
    take = forward_backward.take_update

    def take_update(engine: Any) -> float | None:
        if engine.is_gradient_accumulation_boundary():
            gradients.update(
                (name, safe_get_full_grad(each).clone()) for name, each in engine.module.named_parameters()
            )
        return take(engine)

    with mock.patch.object(forward_backward, "take_update", take_update):
        result = forward_backward.passes_of(engine, spec, Routing(model_of(engine))).step(iter(batches))
    losses = gather_floats([result.loss])
    return gradients, sum(loss for (loss,) in losses) / len(losses)


def _with_trainer(pairs: Sequence[Pair], passes: int) -> "tuple[dict[str, Tensor], float]":
    """Return the gradients and the logged loss of a step of Hugging Face's Trainer."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    gradients: dict[str, Tensor] = {}

    class Kept(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            inner = getattr(model, "module", model)
            gradients.update((name, each.grad.clone()) for name, each in inner.named_parameters())

    with TemporaryDirectory() as folder:
        trainer = Seq2SeqTrainer(
            model=_huggingface_model(),
            args=Seq2SeqTrainingArguments(
                output_dir=folder,
                use_cpu=True,
                ddp_backend="gloo",
                per_device_train_batch_size=PAIRS // int(os.environ["WORLD_SIZE"]) // passes,
                gradient_accumulation_steps=passes,
                max_steps=1,
                max_grad_norm=0,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": pair.source.tolist(), "labels": pair.target.tolist()} for pair in pairs],
            data_collator=_padded,
            callbacks=[Kept()],
        )
        trainer.train()
    return gradients, float(trainer.state.log_history[0]["loss"])


def _padded(examples: Sequence[dict[str, list[int]]]) -> "dict[str, Tensor]":
    """Pad to the longest, as DataCollatorForSeq2Seq does."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    sources, targets = ([torch.tensor(each[name]) for each in examples] for name in ("input_ids", "labels"))
    inputs = pad_sequence(sources, batch_first=True, padding_value=PAD)
    mask = pad_sequence([torch.ones_like(each) for each in sources], batch_first=True)
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    raise SystemExit(main())

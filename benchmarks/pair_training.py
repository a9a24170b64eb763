"""Measure how fast this project fine-tunes on pairs next to Hugging Face's Seq2SeqTrainer, on one GPU, in one run.

::

    python -m benchmarks.pair_training finetune_base 'pairs.jsonl#source=en&target=de' --tokenizer T5_MODEL --root DIR
        [--only ours,trainer,text] [--steps 25] [--ours 64,128] [--trainer 128,256,512] [--text 128]
        [--set layout.zero_stage=1] [--until-seconds 480] [--plot losses.svg] [--into benchmarks/results/NAME.json]

- ours: training as a run does it: pairs are split, tokenised and packed, and ranks read these shards, start from a
  model in a folder, and write metrics, which are what is shown.
- trainer: Seq2SeqTrainer with DeepSpeed ZeRO-2 and length grouping, not compiled, with as many pairs a step as ours has
  on average, in as many passes as its micro-batch needs. No gradient checkpointing.
- text: pre-training of --text-recipe (base) on random tokens, as ``t5-pretrain bench`` measures it, for its MFU.

Both that train on pairs start from the same random weights, and get the same token ids of the same pairs, AdamW with
the same constant rate, and the recipe's dropout. The options with their names list micro-batches to try: rows of ours
and of text, pairs of the trainer. All are measured alike; the fastest of each contender counts. What differs: the order
of the pairs, and thus the pairs of a step; where weights are in 16 bits; and the Trainer divides the loss of each pass
by that pass's target tokens, and adds up the gradients of passes without dividing them by their number.

Real tokens are those of sources and targets without padding. A rate is the median over the steps after warm-up; the
Trainer's steps are of unequal lengths, so that of all steps together stands beside it. Losses are means over the target
tokens of a step. Those of the Trainer are computed from its logits in fp32, in time that is not counted.

A finished measurement is appended to DIR/pairs.jsonl, and is not repeated by the next command with the same root, as in
benchmarks.training_peers. Expected for base on an H200: 100 s for each of ours and of text, 50 s for each of the
Trainer. The exit code is 1 if a measurement failed, and 3 if time ran out.
"""

import argparse
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.comparison import Comparison, compare, parser, result, settings_of
from benchmarks.finished_rows import FinishedRow, FinishedRows
from benchmarks.measured_result import Figure, spread
from benchmarks.pair_trainer import PROGRAM, MeasuredOnPairs, PairTrainerJob
from benchmarks.random_model import random_model
from benchmarks.time_budget import NOT_FINISHED, OutOfTime
from flows.cli.terminal import progress_display
from flows.spec_from_recipe import resolve
from infra.head.benchmark_run import benchmark, measure_ranks
from infra.head.training_run import hold_ready_run, train_run
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.data.vocabulary.tokenizer import TOKENIZER_JSON, given_tokenizer
from t5train.errors import T5TrainError
from t5train.files.run_folder import CHECKPOINTS, METRICS
from t5train.model.model_shape import count_parameters
from t5train.model.model_shape import resolve as resolve_shape
from t5train.records import metrics
from t5train.records.stage_records import PairShards, TokenizerFiles
from t5train.spec import RunSpec
from t5train.train.step_benchmark import WARM_UP_STEPS, tokens_a_step

OURS, TRAINER, TEXT = "ours", "trainer", "text"
CONTENDERS = (OURS, TRAINER, TEXT)
DEFAULTS = {"optimizer.kind": "adamw", "optimizer.peak_learning_rate": "0.0003"}
SAME = {"optimizer.schedule": "constant", "optimizer.warmup_steps": "0", "cluster.ranks": "1"}
"""What both contenders on pairs can have: a rate that never changes."""
FIRST_GUESS_SECONDS = {OURS: 110.0, TRAINER: 70.0, TEXT: 110.0}
_NEVER = 1 << 30
_LAST = 5


class PairRow(FinishedRow):
    """A finished measurement. Numbers of tokens and pairs are those of the steps after warm-up, losses of all steps."""

    contender: str
    micro_batch: int
    shards: str
    """The fingerprint of the pairs."""
    step_seconds: list[float]
    real_tokens: list[float]
    row_tokens: list[float]
    memory_bytes: int
    pairs: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    mfu: float | None = None

    @property
    def rates(self) -> list[float]:
        """Real tokens a second, of each step."""
        return [tokens / seconds for tokens, seconds in zip(self.real_tokens, self.step_seconds, strict=True)]

    @property
    def rate(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)


class Subjects(NamedTuple):
    """What is trained: the comparison, whose spec starts from a model, and the pairs."""

    comparison: Comparison
    shards: PairShards
    tokenizer: TokenizerFiles
    text: RunSpec

    @property
    def pairs_a_step(self) -> float:
        """Pairs of a step of ours, on average."""
        counts = self.shards.counts
        return self.comparison.spec.optimizer.global_batch_sequences * counts["train_pairs"] / counts["train_rows"]


def main() -> int:
    """Measure what is not yet measured, and print the table. Return 1 if a measurement failed, 3 if time ran out."""
    given = _arguments()
    settings = {**DEFAULTS, **settings_of(given.set), **SAME, "pairs.train": json.dumps([given.pairs])}
    given.set = [f"{name}={value}" for name, value in (settings | {"tokenizer.path": given.tokenizer}).items()]
    comparison = compare(given)
    try:
        subjects = _subjects(comparison, resolve(given.text_recipe, {"cluster.ranks": 1}))
        rows = FinishedRows(comparison.root / "pairs.jsonl", PairRow, comparison.subject)
        if ignored := rows.ignored():
            print(ignored, flush=True)
        code = _measure_all(subjects, rows, _planned(given, subjects))
    except T5TrainError as error:
        raise SystemExit(str(error)) from None
    measured = [row for row in rows.finished if row.shards == subjects.shards.fingerprint]
    if curves := [best for name in (OURS, TRAINER) if (best := _fastest(measured, name))]:
        _plot(curves, given.plot or comparison.root / "losses.svg")
    what = f"Fine-tuning {given.recipe} on pairs next to Seq2SeqTrainer"
    command = f"benchmarks.pair_training {shlex.join(sys.argv[1:])}"
    result(comparison, what, command, _notes(subjects), _table(measured)).show(given.into)
    return code


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, steps=25)
    made.add_argument("pairs", help="file of pairs with its columns, as t5-pretrain finetune --train takes it")
    made.add_argument("--tokenizer", required=True, help="spiece.model, or folder with one")
    made.add_argument("--only", default=",".join(CONTENDERS), help="comma-separated contenders")
    made.add_argument("--text-recipe", default="base", help="recipe of pre-training whose MFU ours is relative to")
    for name, default in ((OURS, "64,128"), (TRAINER, "128,256,512"), (TEXT, "128")):
        made.add_argument(f"--{name}", default=default, metavar="SIZES", help=f"micro-batches; {default} by default")
    made.add_argument("--plot", type=Path, help="file for the losses, .svg or .png; DIR/losses.svg if left out")
    return made.parse_args()


def _planned(given: argparse.Namespace, subjects: Subjects) -> list[tuple[str, int]]:
    """Return contenders and micro-batches: the first of each contender, then the second of each."""
    chosen = given.only.split(",")
    if unknown := set(chosen) - set(CONTENDERS):
        raise SystemExit(f"--only names {sorted(unknown)}: choose from {', '.join(CONTENDERS)}")
    sizes = {name: [int(size) for size in getattr(given, name).split(",")] for name in CONTENDERS if name in chosen}
    for name, spec in ((OURS, subjects.comparison.spec), (TEXT, subjects.text)):
        for size in sizes.get(name, []):
            spec.with_settings({"layout.micro_batch_sequences": size})  # raises SpecError before anything is measured
    rounds = zip_longest(*([(name, size) for size in each] for name, each in sizes.items()))
    return [planned for each in rounds for planned in each if planned]


def _subjects(comparison: Comparison, text: RunSpec) -> Subjects:
    """Make the shards, and the model that all start from, unless an earlier command has made them."""
    spec, root = comparison.spec, comparison.root
    assert spec.tokenizer.path is not None
    with progress_display() as progress:
        tokenizer = given_tokenizer(Path(spec.tokenizer.path), root, progress)
        shards = build_pair_shards(spec.pairs, build_pairs(spec.pairs, root, progress), tokenizer, root, progress)
    start = random_model(spec, tokenizer, root)
    changed = spec.with_settings({"model.start_from": json.dumps(str(start)), "storage.root": json.dumps(str(root))})
    return Subjects(comparison._replace(spec=changed), shards, tokenizer, text)


def _measure_all(subjects: Subjects, rows: FinishedRows[PairRow], planned: Sequence[tuple[str, int]]) -> int:
    """Measure what is not yet measured, as far as time allows. Return the exit code."""
    code = 0
    try:
        for contender, size in planned:
            wanted = (contender, size, subjects.shards.fingerprint)
            if any((row.contender, row.micro_batch, row.shards) == wanted for row in rows.finished):
                continue
            try:
                _measure(subjects, rows, contender, size)
            except T5TrainError as error:
                print(f"{contender} with micro-batch {size} failed: {error}", flush=True)
                code = 1
    except OutOfTime as error:
        print(f"stopped: {error}. The same command continues", flush=True)
        code = NOT_FINISHED
    finally:
        subjects.comparison.budget.close()
    return code


def _measure(subjects: Subjects, rows: FinishedRows[PairRow], contender: str, size: int) -> None:
    """Measure once, and append the row. Raises OutOfTime if there is no time for it, or the error of a rank."""
    like = [row.duration_seconds for row in rows.like() if row.contender == contender]
    expected = max(like, default=FIRST_GUESS_SECONDS[contender])
    what, started = f"{contender} with micro-batch {size}", time.monotonic()
    subjects.comparison.budget.require(what, expected)
    print(f"{what}: starts, expected to take {expected:.0f} s", flush=True)
    found = {OURS: _ours, TRAINER: _trainer, TEXT: _text}[contender](subjects, size)
    seconds = time.monotonic() - started
    row = PairRow(
        **subjects.comparison.facts(),
        contender=contender,
        micro_batch=size,
        shards=subjects.shards.fingerprint,
        duration_seconds=seconds,
        **found,
    )
    rows.add(row)
    print(f"{what}: {row.rate:,.0f} real tokens/s, {row.memory_bytes / 2**30:.1f} GiB, after {seconds:.0f} s")


def _ours(subjects: Subjects, size: int) -> dict[str, Any]:
    """Train a run, and return what its metrics say of it. Its checkpoint, which is not used, is removed."""
    steps = WARM_UP_STEPS + subjects.comparison.subject.steps
    spec = subjects.comparison.spec.with_settings(
        {
            "name": f"ours-{size}",
            "layout.micro_batch_sequences": size,
            "optimizer.num_steps": steps,
            "storage.checkpoint_every_steps": _NEVER,
            "storage.validate_every_steps": _NEVER,
            "storage.validate_sequences": 8,
        }
    )
    shutil.rmtree(spec.run_folder, ignore_errors=True)  # what was interrupted would have steps of two attempts
    with hold_ready_run(spec) as run, progress_display() as progress:
        train_run(spec, subjects.shards, run, progress)
    shutil.rmtree(spec.run_folder / CHECKPOINTS)
    lines = [line for line in metrics.read(spec.run_folder / METRICS) if "loss" in line]
    taken = lines[WARM_UP_STEPS:]
    seconds = _values(taken, "seconds")
    mfu = _values(taken, "mfu")
    rates = _values(taken, "real_tokens_per_second")
    return {
        "step_seconds": seconds,
        "real_tokens": [rate * each for rate, each in zip(rates, seconds, strict=True)],
        "row_tokens": [tokens_a_step(spec)] * len(taken),
        "pairs": [subjects.pairs_a_step] * len(taken),
        "losses": _values(lines, "loss"),
        "memory_bytes": max(_values(lines, "memory_bytes")),
        "mfu": statistics.median(mfu) if mfu else None,
    }


def _values(lines: Sequence[metrics.Values], name: str) -> list[float]:
    return [value for line in lines if (value := line.get(name)) is not None]


def _trainer(subjects: Subjects, size: int) -> dict[str, Any]:
    comparison = subjects.comparison
    folder = comparison.root / "logs" / f"trainer-{size}"
    shutil.rmtree(folder, ignore_errors=True)
    job = PairTrainerJob(
        spec=comparison.spec,
        vocab_size=int(subjects.shards.counts["vocab_size"]),
        steps=comparison.subject.steps,
        shards=subjects.shards.path,
        tokenizer_file=subjects.tokenizer.path / TOKENIZER_JSON,
        pairs_a_pass=size,
        passes=max(1, round(subjects.pairs_a_step / size)),
    )
    measure_ranks(PROGRAM, job, folder)
    found = MeasuredOnPairs.model_validate_json((folder / "measured.json").read_text("utf-8"))
    after = {name: getattr(found, name)[WARM_UP_STEPS:] for name in ("real_tokens", "row_tokens", "pairs")}
    return after | found.model_dump(include={"step_seconds", "losses", "memory_bytes"})


def _text(subjects: Subjects, size: int) -> dict[str, Any]:
    spec = subjects.text.with_settings({"layout.micro_batch_sequences": size})
    with progress_display() as progress:
        measured = benchmark(spec, subjects.comparison.subject.steps, progress)
    tokens = [measured.tokens_a_step] * len(measured.step_seconds)
    return {"real_tokens": tokens, "row_tokens": tokens} | measured.model_dump(
        include={"step_seconds", "memory_bytes", "mfu"}
    )


def _fastest(rows: Sequence[PairRow], contender: str) -> PairRow | None:
    return max((row for row in rows if row.contender == contender), key=lambda row: row.rate, default=None)


def _table(rows: Sequence[PairRow]) -> list[dict[str, Figure]]:
    best = {name: _fastest(rows, name) for name in CONTENDERS}
    ordered = sorted(rows, key=lambda row: (CONTENDERS.index(row.contender), row.micro_batch))
    return [_figures(row, best[OURS], best[TEXT]) for row in ordered]


def _figures(row: PairRow, ours: PairRow | None, text: PairRow | None) -> dict[str, Figure]:
    relative = row.mfu / text.mfu if row.contender == OURS and row.mfu and text and text.mfu else None
    return {
        "contender": row.contender,
        "micro-batch": row.micro_batch,
        "real tokens/s": spread(row.rates, 0),
        "all steps, real tokens/s": round(sum(row.real_tokens) / sum(row.step_seconds)),
        "ours relative to it": round(ours.rate / row.rate, 2) if ours and row.contender == TRAINER else None,
        "step, ms": spread([seconds * 1e3 for seconds in row.step_seconds], 1),
        "peak memory, GiB": round(row.memory_bytes / 2**30, 1),
        "real tokens": round(sum(row.real_tokens) / sum(row.row_tokens), 3),
        "pairs a step": round(statistics.mean(row.pairs)) if row.pairs else None,
        "MFU": row.mfu and round(row.mfu, 3),
        "MFU relative to text": relative and round(relative, 2),
        "first loss": round(row.losses[0], 3) if row.losses else None,
        f"mean of the last {_LAST} losses": round(statistics.mean(row.losses[-_LAST:]), 3) if row.losses else None,
    }


def _notes(subjects: Subjects) -> str:
    comparison, counts = subjects.comparison, subjects.shards.counts
    spec, steps = comparison.spec, comparison.subject.steps
    shape = resolve_shape(spec.model, int(counts["vocab_size"]))
    optimizer, pairs = spec.optimizer, spec.pairs
    return (
        f"{count_parameters(shape):,} parameters; {counts['train_pairs']:,} pairs in {counts['train_rows']:,} rows of "
        f"{pairs.input_tokens} + {pairs.target_tokens} tokens, {optimizer.global_batch_sequences} rows a step, {steps} "
        f"steps after {WARM_UP_STEPS}, {optimizer.kind} {optimizer.peak_learning_rate}, dropout "
        f"{spec.model.dropout_rate}, {optimizer.precision}; text is {subjects.text.recipe} on random tokens. MFU "
        "counts whole rows, padding included. Rates are medians over steps, with their range."
    )


def _plot(curves: Sequence[PairRow], into: Path) -> None:
    """Draw the loss of each step."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(7, 3.5), layout="constrained")
    axes = picture.add_subplot()
    for row in curves:
        label = f"{'t5-pretrain' if row.contender == OURS else 'Seq2SeqTrainer'}, micro-batch {row.micro_batch}"
        axes.plot(range(1, len(row.losses) + 1), row.losses, label=label, marker=".")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per target token)")
    axes.legend()
    axes.grid(alpha=0.3)
    picture.savefig(into)


if __name__ == "__main__":
    sys.exit(main())

"""Pre-train on text, fine-tune on pairs, and measure what that is worth on held-out pairs, on one GPU.

::

    python -m benchmarks.real_task finetune_base --text FOLDER --train 'train.jsonl#source=en&target=de&task=en-de'
        --validation validation.jsonl --test test.jsonl --tokenizer T5_MODEL --root DIR
        [--text-recipe base] [--text-steps 2200] [--steps 600] [--seeds 0,1] [--set evaluate.num_beams=4]
        [--text-set objective.input_tokens=256] [--until-seconds 570] [--into benchmarks/results/NAME.json]

- pre-trained: the fine-tuning recipe, from the export of the pre-training recipe, once for each seed.
- from scratch: the same pairs, steps, settings and seeds, from random weights of the same shape.

All stages are those of a run, from reading the data to the evaluation of the export, without certificate and
publication; the learning rate passes through its whole schedule in the given steps, with a tenth of them warm-up. So
the baselines are those of the evaluation: the source copied, the model before fine-tuning, and the model given sources
of other pairs. Their hypotheses and those of the models are scored against the same references, at most
evaluate.max_pairs of each split, with 95% intervals by bootstrap. Predictions stay in DIR/runs/*/export/evaluation.

A finished part is appended to DIR/real-task.jsonl and not repeated by the next command with the same root; one that was
interrupted continues from its last checkpoint, which is saved when time runs out, too, if that takes 20 s at most.
Checkpoints of finished parts are removed. Expected for base on an H200: 390 s for pre-training, and 150 s for each
fine-tuning. The exit code is 3 if time ran out.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparison import Comparison, compare, parser, result, settings_of
from benchmarks.finished_rows import FinishedRow, FinishedRows
from benchmarks.measured_result import Figure
from benchmarks.time_budget import NOT_FINISHED, Ending, OutOfTime
from flows.cli.terminal import progress_display
from flows.spec_from_recipe import resolve
from infra.head.training_run import hold_ready_run, train_run
from t5train.checkpoint.consolidate import consolidate
from t5train.data.corpus import build_corpus
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import given_tokenizer
from t5train.errors import T5TrainError
from t5train.files.atomic import discard, write_text
from t5train.files.run_folder import CHECKPOINTS, EXPORT, METRICS, WEIGHTS, WITNESS_FOLDER
from t5train.inference.evaluation.export_evaluation import evaluate_export
from t5train.progress import Progress
from t5train.records import metrics
from t5train.records.evaluation_metrics import SYSTEMS, EvaluationMetrics, recorded_metrics, weights_of
from t5train.records.stage_records import Corpus, Export, Pairs, TokenizerFiles
from t5train.release.export import export
from t5train.spec import RunSpec
from t5train.spec.rank_job import Shards

TEXT, PRE_TRAINED, SCRATCH = "text", "pre-trained", "from scratch"
FIRST_GUESS_SECONDS = 60.0
"""Less time than a part takes, as an interrupted one continues: enough to start it, train some steps, and save."""
SCHEDULE = {
    "optimizer.schedule": "linear",
    "optimizer.peak_learning_rate": "0.01",
    "optimizer.final_learning_rate": "0",
}
"""For so few steps that a model which has learned little is far from done: a recipe's rate is for a long run."""
_SPLITS = ("train", "validation", "test")
_METRICS = {"bleu": "BLEU", "bleu_intl": "BLEU, intl", "chrf": "chrF", "exact_match": "exact match"}
_SAME_FOR_ALL = ("copy", "start")
"""Systems whose predictions do not depend on what is trained."""
_SHOWN_EXAMPLES = 8


class TaskRow(FinishedRow):
    """A finished part: pre-training, or a fine-tuning with its evaluation."""

    contender: str
    seed: int
    run: str
    """The name of its folder."""
    data: str
    """The fingerprint of the text or the pairs."""
    losses: dict[str, float]
    """The last validation's, and the last training loss."""
    weights: dict[str, str]
    """The sha256 of each file of weights."""
    evaluation: EvaluationMetrics | None = None

    @property
    def label(self) -> str:
        """What was trained."""
        return f"{self.contender}, seed {self.seed}"


class Task(NamedTuple):
    """What is trained on what."""

    comparison: Comparison
    text: RunSpec
    corpus: Corpus
    pairs: Pairs
    tokenizer: TokenizerFiles
    of_text: FinishedRows[TaskRow]
    """Finished pre-training, which does not depend on the settings of fine-tuning."""
    of_pairs: FinishedRows[TaskRow]

    @property
    def finished(self) -> list[TaskRow]:
        """What is finished with this text and these pairs."""
        data = {self.corpus.fingerprint, self.pairs.fingerprint}
        return [row for rows in (self.of_text, self.of_pairs) for row in rows.finished if row.data in data]

    def spec(self, contender: str, seed: int) -> RunSpec:
        """Return the spec of a part. Other settings are another run."""
        if contender == TEXT:
            return self.text
        start = self.text.run_folder / EXPORT if contender == PRE_TRAINED else None
        changes = {"optimizer.seed": seed, "model.start_from": json.dumps(start and str(start))}
        return self.comparison.spec.with_settings(changes)


def main() -> int:
    """Do what is not yet done, and print the table. Return 3 if time ran out."""
    given = _arguments()
    same = {"cluster.ranks": "1", "tokenizer.path": given.tokenizer, "storage.keep_last": "1"}
    pairs = {f"pairs.{split}": json.dumps([getattr(given, split)]) for split in _SPLITS}
    of_pairs = SCHEDULE | _short(given.steps) | same | pairs | settings_of(given.set)
    of_text = _short(given.text_steps) | same | {"corpus.source": given.text}
    of_text |= settings_of(given.text_set, "--text-set")
    given.set = [f"{name}={value}" for name, value in of_pairs.items()]
    comparison, code = compare(given), 0
    task: Task | None = None
    try:
        task = _task(comparison, given, of_text)
        _do_all(task, given.seeds)
    except OutOfTime as error:
        print(f"stopped: {error}. The same command continues", flush=True)
        code = NOT_FINISHED
    except T5TrainError as error:
        raise SystemExit(str(error)) from None
    finally:
        comparison.budget.close()
    if task is not None:
        _show(task, given)
    return code


def _show(task: Task, given: argparse.Namespace) -> None:
    """Print the table, and write it with examples if a file is named."""
    what = f"Pre-training {given.text_recipe} and fine-tuning {given.recipe} on a real task"
    command, rows = f"benchmarks.real_task {shlex.join(sys.argv[1:])}", task.finished
    found = result(task.comparison, what, command, _notes(task, rows), _table(rows))
    print(found.text())
    if given.into:
        with_examples = found.model_copy(update={"rows": [*found.rows, *_examples(rows)]})
        write_text(given.into, with_examples.model_dump_json(indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, steps=600)
    made.add_argument("--text", required=True, help="text to pre-train on, as t5-pretrain run --corpus takes it")
    for split in _SPLITS:
        made.add_argument(f"--{split}", required=True, metavar="FILE", help=f"pairs, as pairs.{split} names them")
    made.add_argument("--tokenizer", required=True, help="spiece.model, or folder with one")
    made.add_argument("--text-recipe", default="base", help="recipe of pre-training; base by default")
    made.add_argument("--text-steps", type=int, default=2200, help="steps of pre-training; 2200 by default")
    made.add_argument("--text-set", action="append", default=[], metavar="PART.KEY=VALUE", help="setting of it")
    made.add_argument("--seeds", default="0,1", help="comma-separated seeds of fine-tuning")
    given = made.parse_args()
    given.seeds = tuple(map(int, given.seeds.split(",")))
    return given


def _short(steps: int) -> dict[str, str]:
    """Return the settings of a run of so few steps."""
    return {
        "optimizer.num_steps": str(steps),
        "optimizer.warmup_steps": str(steps // 10),
        "storage.checkpoint_every_steps": str(max(1, steps // 2)),
        "storage.validate_every_steps": str(max(1, steps // 4)),
    }


def _task(comparison: Comparison, given: argparse.Namespace, text_changes: dict[str, str]) -> Task:
    """Read text and pairs, or verify what an earlier command has made of them."""
    root, subject = comparison.root, comparison.subject
    text = resolve(given.text_recipe, text_changes, root=root)
    spec = comparison.spec.with_settings({"storage.root": json.dumps(str(root))})
    settings = tuple(f"text: {name}={value}" for name, value in text_changes.items())
    of_text = subject.model_copy(update={"recipe": given.text_recipe, "settings": settings, "steps": given.text_steps})
    of_pairs = subject.model_copy(update={"settings": (*subject.settings, *settings)})
    with progress_display() as progress:
        return Task(
            comparison._replace(spec=spec),
            text,
            build_corpus(text.corpus, root, progress),
            build_pairs(spec.pairs, root, progress),
            given_tokenizer(Path(given.tokenizer), root, progress),
            *(FinishedRows(root / "real-task.jsonl", TaskRow, each) for each in (of_text, of_pairs)),
        )


def _do_all(task: Task, seeds: Sequence[int]) -> None:
    """Do what is not yet done: of each seed first the one that was pre-trained."""
    for ignored in filter(None, (task.of_text.ignored(), task.of_pairs.ignored())):
        print(ignored, flush=True)
    for contender, seed in [(TEXT, 0), *((name, seed) for seed in seeds for name in (PRE_TRAINED, SCRATCH))]:
        if (contender, seed) not in {(row.contender, row.seed) for row in task.finished}:
            _do(task, contender, seed)


def _do(task: Task, contender: str, seed: int) -> None:
    """Do a part, or continue it, and append its row."""
    what, started = f"{contender}, seed {seed}", time.monotonic()
    task.comparison.budget.require(what, FIRST_GUESS_SECONDS)
    print(f"{what}: starts", flush=True)
    spec = task.spec(contender, seed)
    if not (spec.run_folder / CHECKPOINTS).exists():  # it was finished with other code, as its export says
        discard(spec.run_folder)
    with progress_display() as progress:
        exported = _exported(task, spec, progress)
        if spec.is_fine_tuning:
            exported = evaluate_export(exported, task.pairs, spec, spec.run_folder, progress)
    data, rows = (task.pairs, task.of_pairs) if spec.is_fine_tuning else (task.corpus, task.of_text)
    row = TaskRow(
        **{**task.comparison.facts(), "subject": rows.subject},
        contender=contender,
        seed=seed,
        run=spec.run_name,
        data=data.fingerprint,
        losses=_last_losses(spec.run_folder / METRICS),
        weights=weights_of(exported.files),
        evaluation=recorded_metrics(exported.path, exported.files),
        duration_seconds=time.monotonic() - started,
    )
    rows.add(row)
    for name in (CHECKPOINTS, WEIGHTS):  # if time runs out now, none stays in part
        discard(spec.run_folder / name)
    print(f"{what}: done after {row.duration_seconds:.0f} s, {row.losses}", flush=True)


def _exported(task: Task, spec: RunSpec, progress: Progress) -> Export:
    """Train a run from its last checkpoint, and export it."""
    folder, root = spec.run_folder, spec.storage.root
    shards: Shards
    if spec.is_fine_tuning:
        shards = build_pair_shards(spec.pairs, task.pairs, task.tokenizer, root, progress)
    else:
        shards = build_shards(spec.shards, spec.corpus, task.corpus, task.tokenizer, root, progress)
    try:
        with hold_ready_run(spec) as run:
            checkpoint = train_run(spec, shards, run, task.comparison.budget.until_saving(progress))
    except Ending:
        raise OutOfTime(f"{spec.run_name} was not trained to its end in time") from None
    out, start = folder / WEIGHTS, spec.model.start_from
    weights = consolidate(folder / CHECKPOINTS, out, tag=checkpoint.tag, start_from=start, progress=progress)
    return export(weights, task.tokenizer, folder / WITNESS_FOLDER, spec, folder / EXPORT, progress)


def _last_losses(file: Path) -> dict[str, float]:
    last: dict[str, float] = {}
    for line in metrics.read(file):
        last |= {name: value for name, value in line.items() if name.endswith("loss") and value is not None}
    return {name: round(value, 4) for name, value in last.items()}


def _table(rows: Sequence[TaskRow]) -> list[dict[str, Figure]]:
    """Return a row for pre-training, then for each system and split, the baselines once."""
    table = dict[tuple[str, str], dict[str, Figure]]()
    for row in rows:
        facts: dict[str, Figure] = {
            "run": row.run,
            "seconds": round(row.duration_seconds),
            "validation loss": row.losses.get("validation_loss"),
            "weights": " ".join(row.weights.values()),
        }
        if row.evaluation is None:
            table[row.label, ""] = {"system": "pre-training", **facts}
            continue
        predictions = " ".join(row.evaluation.predictions.values())
        for group in row.evaluation.groups:
            ended = {"not ended": group.not_ended, "unknown": group.unknown}
            of_model = facts | ended | {"predictions": predictions}
            for system, found in group.systems.items():
                own = row.label if system == "model" else f"{row.label}, {system}"
                shown = SYSTEMS[system] if system in _SAME_FOR_ALL else own
                figures: dict[str, Figure] = {"system": shown, "split": group.split, "pairs": group.pairs}
                figures |= {title: found[name].with_interval for name, title in _METRICS.items() if name in found}
                table.setdefault((shown, group.split), figures | (of_model if system == "model" else {}))
    return list(table.values())


def _examples(rows: Sequence[TaskRow]) -> Iterator[dict[str, Figure]]:
    """Yield the first examples of the evaluations, which are of the same pairs."""
    evaluated = {row.label: row.evaluation for row in rows if row.evaluation}
    of_all = zip(*(each.examples[:_SHOWN_EXAMPLES] for each in evaluated.values()), strict=True)
    for examples in of_all:
        hypotheses = dict(zip(evaluated, (each.hypothesis for each in examples), strict=True))
        yield {"source": examples[0].source, "reference": examples[0].reference, **hypotheses}


def _notes(task: Task, rows: Sequence[TaskRow]) -> str:
    spec, text, counts = task.comparison.spec, task.text, task.pairs.counts
    signatures = next((row.evaluation.signatures for row in rows if row.evaluation), {})
    losses = {row.label: row.losses for row in rows}
    return (
        f"{text.optimizer.num_steps} steps of {text.optimizer.global_batch_sequences} rows of text; "
        f"{spec.optimizer.num_steps} steps of {spec.optimizer.global_batch_sequences} rows of pairs "
        f"({spec.pairs.input_tokens} + {spec.pairs.target_tokens} tokens), {spec.optimizer.kind} "
        f"{spec.optimizer.peak_learning_rate}, {spec.optimizer.schedule}, dropout {spec.model.dropout_rate}, "
        f"{spec.optimizer.precision}. {counts['train_pairs']:,} pairs to train on, {counts['validation_pairs']:,} to "
        f"validate on and {counts['test_pairs']:,} to test on. {signatures}. Last losses: {losses}."
    )


if __name__ == "__main__":
    sys.exit(main())

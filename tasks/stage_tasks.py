"""The stages as Prefect tasks: one library call each.

Each task reports its progress to Prefect and to ``watcher``. The library decides whether to reuse an existing result;
Prefect neither caches nor stores results. Training is retried after a transient failure, and resumes from its newest
complete checkpoint. Weights and the export are in the run's own folder and can be made again from its checkpoint, so a
damaged one is moved aside and made again. A checkpoint or a publication is never moved aside here.
"""

from functools import partial
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from infra.head.launch.held_run import HeldRun
from infra.head.predicting.hosts_predictor import evaluating_hosts
from infra.head.preflight.remote_starts import complete_start
from infra.head.tokenising.hosts_executor import shard_workers
from infra.head.training_run import train_run
from t5train.data.corpus import build_corpus
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.errors import T5TrainError
from t5train.files import run_folder
from t5train.files.atomic import write_json
from t5train.inference.evaluation.export_evaluation import evaluate_export
from t5train.progress import Progress, silent
from t5train.records.identity import fingerprint
from t5train.records.stage_records import (
    Checkpoint,
    Corpus,
    Export,
    Pairs,
    PairShards,
    Publication,
    Record,
    TokenizerFiles,
    TokenShards,
    Weights,
    set_damaged_aside,
)
from t5train.release.certification import certify_in_fresh_process
from t5train.release.export import export
from t5train.release.publication import publish
from t5train.spec import RunSpec
from t5train.spec.rank_job import Shards
from tasks import reports, stages
from tasks.stage_progress import StageProgress, TrainingView
from tasks.stages import stage_task


@stage_task(stages.CORPUS)
def make_corpus(spec: RunSpec, watcher: Progress = silent) -> Corpus:
    """Copy the weights to start from if they are on the Hub or in a bucket; find or make the text, and verify it."""
    progress = StageProgress(stages.CORPUS, watcher)
    complete_start(spec, progress)
    return build_corpus(spec.corpus, spec.storage.root, progress)


@stage_task(stages.PAIRS)
def make_pairs(spec: RunSpec, watcher: Progress = silent) -> Pairs:
    """Copy the weights to start from as ``make_corpus`` does; read, check and split the pairs, and keep a copy."""
    progress = StageProgress(stages.PAIRS, watcher)
    complete_start(spec, progress)
    return build_pairs(spec.pairs, spec.storage.root, progress)


@stage_task(stages.TOKENIZER)
def make_tokenizer(spec: RunSpec, corpus: Corpus, watcher: Progress = silent) -> TokenizerFiles:
    """Train the vocabulary, or use the given one."""
    progress = StageProgress(stages.TOKENIZER, watcher)
    return build_tokenizer(spec.tokenizer, spec.corpus, corpus, spec.storage.root, progress)


@stage_task(stages.TOKENIZER)
def make_tokenizer_of_pairs(spec: RunSpec, pairs: Pairs, watcher: Progress = silent) -> TokenizerFiles:
    """Train the vocabulary on both sides of the pairs, or use the given one."""
    return build_pairs_tokenizer(spec.tokenizer, pairs, spec.storage.root, StageProgress(stages.TOKENIZER, watcher))


@stage_task(stages.SHARDS)
def make_shards(spec: RunSpec, corpus: Corpus, tokenizer: TokenizerFiles, watcher: Progress = silent) -> TokenShards:
    """Convert the text to files of token ids, and report on the data."""
    progress = StageProgress(stages.SHARDS, watcher)
    workers = shard_workers(spec)
    shards = build_shards(spec.shards, spec.corpus, corpus, tokenizer, spec.storage.root, progress, workers=workers)
    reports.show_data(spec, corpus, tokenizer, shards)
    return shards


@stage_task(stages.PAIR_SHARDS)
def make_pair_shards(spec: RunSpec, pairs: Pairs, tokenizer: TokenizerFiles, watcher: Progress = silent) -> PairShards:
    """Convert the pairs to token ids, put those to train on into rows, and report on the pairs."""
    shards = build_pair_shards(
        *(spec.pairs, pairs, tokenizer, spec.storage.root, StageProgress(stages.PAIR_SHARDS, watcher)),
        workers=spec.shards.workers,
        max_unknown_share=spec.shards.max_unknown_share,
    )
    reports.show_pairs(spec, pairs, tokenizer, shards)
    return shards


SECONDS_BEFORE_RETRY = 5


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether the failure is transient, so that a retry can succeed."""
    error = state.data
    return isinstance(error, T5TrainError) and error.retryable


@stage_task(stages.TRAIN, retry_delay_seconds=SECONDS_BEFORE_RETRY, retry_condition_fn=is_transient)
def train(spec: RunSpec, shards: Shards, run: HeldRun, watcher: Progress = silent, adopt: bool = False) -> Checkpoint:
    """Train to the last step, starting from the newest complete checkpoint."""
    with TrainingView(spec, watcher) as view:
        return train_run(spec, shards, run, view, adopt=adopt, staged=view.staged)


@stage_task(stages.CONSOLIDATE)
def consolidate_weights(spec: RunSpec, checkpoint: Checkpoint, watcher: Progress = silent) -> Weights:
    """Join the ranks' parts of the fp32 masters into safetensors."""
    from t5train.checkpoint.consolidate import (
        consolidate,  # imports torch, which a flow that reuses everything does not need
    )

    # Named by content, because training the last steps again on a GPU may give different bytes.
    content = fingerprint({name: digest.sha256 for name, digest in checkpoint.files.items()})
    out = spec.run_folder / run_folder.WEIGHTS / f"{checkpoint.tag}-{content[:12]}"
    checkpoints = spec.run_folder / run_folder.CHECKPOINTS
    set_damaged_aside(out)
    progress, start = StageProgress(stages.CONSOLIDATE, watcher), spec.model.start_from
    return consolidate(checkpoints, out, tag=checkpoint.tag, start_from=start, progress=progress)


@stage_task(stages.EXPORT)
def export_model(spec: RunSpec, weights: Weights, tokenizer: TokenizerFiles, watcher: Progress = silent) -> Export:
    """Write the Hugging Face folder."""
    witness, out = spec.run_folder / run_folder.WITNESS_FOLDER, spec.run_folder / run_folder.EXPORT
    set_damaged_aside(out)
    return export(weights, tokenizer, witness, spec, out, StageProgress(stages.EXPORT, watcher))


@stage_task(stages.EVALUATE)
def evaluate_on_pairs(spec: RunSpec, exported: Export, pairs: Pairs, watcher: Progress = silent) -> Export:
    """Predict held-out pairs with the export, add predictions and metrics to it, and report on them."""
    progress = StageProgress(stages.EVALUATE, watcher)
    evaluated = evaluate_export(
        exported, pairs, spec, spec.run_folder, progress, partial(evaluating_hosts, spec, progress)
    )
    reports.show_evaluation(spec, evaluated)
    return evaluated


@stage_task(stages.CERTIFY)
def certify_export(spec: RunSpec, weights: Weights, exported: Export, watcher: Progress = silent) -> Export:
    """Verify, in a new process, that the export is the model that was trained, write its certificate, and report."""
    progress = StageProgress(stages.CERTIFY, watcher)
    witness = spec.run_folder / run_folder.WITNESS_FOLDER
    certified = certify_in_fresh_process(exported, witness, progress, spec.model.start_from)
    reports.show_proof(spec, weights, certified)
    return certified


@stage_task(stages.PUBLISH)
def publish_export(spec: RunSpec, exported: Export, url: str, watcher: Progress = silent) -> Publication:
    """Publish the certified export, record its URL in the run's folder, and report where it is."""
    publication = publish(exported, url, StageProgress(stages.PUBLISH, watcher))
    note = {"url": publication.url, "fingerprint": publication.fingerprint}
    write_json(spec.run_folder / run_folder.PUBLISHED, note)
    reports.show_publication(spec, publication)
    return publication


@stage_task(stages.SUMMARY)
def summarise(spec: RunSpec, records: dict[str, Record], publication: Publication) -> None:
    """Report on the whole run: losses, plot, and lineage. ``records`` are those of all stages, by their titles."""
    reports.show_summary(spec, records, publication)

"""The stages as Prefect tasks: one library call each.

Each task reports its progress to Prefect and to ``watcher``. The library decides whether to reuse an existing result;
Prefect neither caches nor stores results. Training is retried after a transient failure, and resumes from its newest
complete checkpoint. Weights and the export are in the run's own folder and can be made again from its checkpoint, so a
damaged one is moved aside and made again. A checkpoint or a publication is never moved aside here.
"""

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from infra.head.launch.held_run import HeldRun
from infra.head.training_run import train_run
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.tokenizer import build_tokenizer
from t5train.errors import T5TrainError
from t5train.files import run_folder
from t5train.files.atomic import write_json
from t5train.files.os_errors import as_storage_errors
from t5train.progress import Progress, silent
from t5train.records.identity import fingerprint
from t5train.records.stage_records import (
    Checkpoint,
    Corpus,
    Export,
    Publication,
    TokenizerFiles,
    TokenShards,
    Weights,
    set_damaged_aside,
)
from t5train.release.certification import certify_in_fresh_process
from t5train.release.export import export
from t5train.release.publication import publish
from t5train.spec import RunSpec
from tasks.stage_progress import StageProgress


@task(name="corpus", cache_policy=NO_CACHE)
@as_storage_errors()
def make_corpus(spec: RunSpec, watcher: Progress = silent) -> Corpus:
    """Find or make the text, and verify all its files."""
    return build_corpus(spec.corpus, spec.storage.root, StageProgress("corpus", watcher))


@task(name="tokenizer", cache_policy=NO_CACHE)
@as_storage_errors()
def make_tokenizer(spec: RunSpec, corpus: Corpus, watcher: Progress = silent) -> TokenizerFiles:
    """Train the vocabulary, or use the given one."""
    return build_tokenizer(spec.tokenizer, spec.corpus, corpus, spec.storage.root, StageProgress("tokenizer", watcher))


@task(name="shards", cache_policy=NO_CACHE)
@as_storage_errors()
def make_shards(spec: RunSpec, corpus: Corpus, tokenizer: TokenizerFiles, watcher: Progress = silent) -> TokenShards:
    """Convert the text to files of token ids."""
    return build_shards(
        spec.shards, spec.corpus, corpus, tokenizer, spec.storage.root, StageProgress("shards", watcher)
    )


SECONDS_BEFORE_RETRY = 5


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether the failure is transient, so that a retry can succeed."""
    error = state.data
    return isinstance(error, T5TrainError) and error.retryable


@task(name="train", cache_policy=NO_CACHE, retry_delay_seconds=SECONDS_BEFORE_RETRY, retry_condition_fn=is_transient)
@as_storage_errors()
def train(
    spec: RunSpec, shards: TokenShards, run: HeldRun, watcher: Progress = silent, adopt: bool = False
) -> Checkpoint:
    """Train to the last step, starting from the newest complete checkpoint."""
    return train_run(spec, shards, run, StageProgress("train", watcher), adopt=adopt)


@task(name="consolidate", cache_policy=NO_CACHE)
@as_storage_errors()
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
    return consolidate(checkpoints, out, tag=checkpoint.tag, progress=StageProgress("consolidate", watcher))


@task(name="export", cache_policy=NO_CACHE)
@as_storage_errors()
def export_model(spec: RunSpec, weights: Weights, tokenizer: TokenizerFiles, watcher: Progress = silent) -> Export:
    """Write the Hugging Face folder."""
    witness, out = spec.run_folder / run_folder.WITNESS_FOLDER, spec.run_folder / run_folder.EXPORT
    set_damaged_aside(out)
    return export(weights, tokenizer, witness, spec, out, StageProgress("export", watcher))


@task(name="certify", cache_policy=NO_CACHE)
@as_storage_errors()
def certify_export(spec: RunSpec, exported: Export, watcher: Progress = silent) -> Export:
    """Verify, in a new process, that the export is the model that was trained, and write its certificate."""
    return certify_in_fresh_process(
        exported, spec.run_folder / run_folder.WITNESS_FOLDER, StageProgress("certify", watcher)
    )


@task(name="publish", cache_policy=NO_CACHE)
@as_storage_errors()
def publish_export(spec: RunSpec, exported: Export, url: str, watcher: Progress = silent) -> Publication:
    """Publish the certified export, and record its URL in the run's folder."""
    publication = publish(exported, url, StageProgress("publish", watcher))
    note = {"url": publication.url, "fingerprint": publication.fingerprint}
    write_json(spec.run_folder / run_folder.PUBLISHED, note)
    return publication

"""The stages of one repeat of a case: train, consolidate, export, certify and tokenise, and resuming."""

import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from infra.head.training_run import hold_ready_run, train_run
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.files.run_folder import CHECKPOINTS, EXPORT, METRICS, WEIGHTS, WITNESS_FOLDER, tag_of
from t5train.progress import Progress
from t5train.records import metrics
from t5train.records.metrics import Values
from t5train.records.stage_records import Checkpoint, Export, TokenizerFiles, TokenShards, Weights
from t5train.records.witness import Witness
from t5train.regression.night_results import Point
from t5train.release.certification import certify_in_fresh_process
from t5train.spec import RunSpec

_IMPORTED = (
    "t5train.checkpoint.consolidate.consolidation",
    "t5train.release.export",
    "transformers.models.t5.tokenization_t5",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.configuration_utils",
    "matplotlib.style",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)
_VALIDATION = {
    "validation_loss": "validation loss",
    "validation_content_loss": "validation loss of masked tokens",
    "shuffled_content_loss": "validation loss with shuffled inputs",
    "unigram_content_loss": "unigram baseline",
}


class NightData(NamedTuple):
    """The vocabulary and the token shards of a night, which all its cases train on."""

    tokenizer: TokenizerFiles
    shards: TokenShards


def make_data(spec: RunSpec, progress: Progress) -> NightData:
    """Make text, vocabulary and shards under the spec's root."""
    # imported here, so that the first measured stage does not pay for it (an export would take 12 times as long)
    for module in _IMPORTED:
        import_module(module)
    root = spec.storage.root
    corpus = build_corpus(spec.corpus, root, progress)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root, progress)
    return NightData(tokenizer, build_shards(spec.shards, spec.corpus, corpus, tokenizer, root, progress))


def sharding(spec: RunSpec, data: NightData, progress: Progress) -> Callable[[], None]:
    """Verify the night's text; return what tokenises it again, and removes the result."""
    corpus = build_corpus(spec.corpus, spec.storage.root, progress)

    def make() -> None:
        out = spec.storage.root / "shards" / spec.run_name
        build_shards(spec.shards, spec.corpus, corpus, data.tokenizer, spec.storage.root, progress, out=out)
        shutil.rmtree(out)

    return make


class TrainedCase(NamedTuple):
    """What one training gave."""

    checkpoint: Checkpoint
    witness: Witness
    steps: list[Values]
    """The metrics of every step."""
    curve: list[Point]
    save_seconds: list[float]
    """How long training paused for each checkpoint."""
    validate_seconds: list[float]
    """How long it paused for each validation but the last one."""


def train_case(spec: RunSpec, data: NightData, progress: Progress) -> TrainedCase:
    """Train in a fresh folder to the last step."""
    with hold_ready_run(spec) as run:
        checkpoint = train_run(spec, data.shards, run, progress)
    lines = metrics.read(spec.run_folder / METRICS)
    return TrainedCase(
        checkpoint,
        Witness.load(spec.run_folder / WITNESS_FOLDER),
        [line for line in lines if "loss" in line],
        list(_points(lines)),
        save_seconds=list(_values(lines, "save_seconds")),
        validate_seconds=list(_values(lines, "validate_seconds")),
    )


def _values(lines: list[Values], name: str) -> Iterator[float]:
    return (value for line in lines if (value := line.get(name)) is not None)


def _points(lines: list[Values]) -> Iterator[Point]:
    for line in lines:
        if (loss := line.get("loss")) is not None:
            yield f"loss of step {line['step']}", loss
        for name, label in _VALIDATION.items():
            if (loss := line.get(name)) is not None:
                yield f"{label} after step {line['step']}", loss


def resume_case(trained: RunSpec, spec: RunSpec, step: int, data: NightData, progress: Progress) -> TrainedCase:
    """Train a new run to its end, from the checkpoint that another run of the same case saved at ``step``."""
    tag = Path(CHECKPOINTS) / tag_of(step)
    shutil.copytree(trained.run_folder / tag, spec.run_folder / tag)
    spec.run_folder.chmod(0o700)
    return train_case(spec, data, progress)


def consolidation(spec: RunSpec, trained: TrainedCase, progress: Progress) -> None:
    """Write the weights of the last checkpoint."""
    from t5train.checkpoint.consolidate import consolidate  # imports torch

    consolidate(spec.run_folder / CHECKPOINTS, spec.run_folder / WEIGHTS, tag=trained.checkpoint.tag, progress=progress)


def exporting(spec: RunSpec, data: NightData, progress: Progress) -> None:
    """Write the Hugging Face folder."""
    from t5train.release.export import export  # imports torch

    weights = Weights.load(spec.run_folder / WEIGHTS)
    export(weights, data.tokenizer, spec.run_folder / WITNESS_FOLDER, spec, spec.run_folder / EXPORT, progress)


def certification(spec: RunSpec, progress: Progress) -> None:
    """Write the certificate."""
    certify_in_fresh_process(Export.load(spec.run_folder / EXPORT), spec.run_folder / WITNESS_FOLDER, progress)

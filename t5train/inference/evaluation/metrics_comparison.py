"""Compares the metrics in an export with its predictions, from which they are computed again.

The predictions themselves are not made again: the certificate covers their digests.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.errors import InputError
from t5train.inference.evaluation.held_out_metrics import measure
from t5train.inference.predict.predictions import Prediction, read_predictions
from t5train.inference.score.row_statistics import EXACT_MATCH
from t5train.records.evaluation_metrics import (
    EVALUATION_METRICS,
    PREDICTED,
    PREDICTED_BY_START,
    EvaluationMetrics,
    weights_of,
)
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.certificate import EvaluationComparison
from t5train.release.folder_comparison import differing_values, first_of


def compare_metrics(
    export: Export, recorded: EvaluationMetrics, witness: Witness
) -> tuple[list[str], EvaluationComparison]:
    """See ``t5train.release.certification.CompareMetrics``."""
    predicted = list(read_predictions(export.path / PREDICTED))
    by_start = _read(export.path / PREDICTED_BY_START)
    found = list(_differing(export, recorded, witness, predicted, by_start))
    metrics = sum(len(metrics) for group in recorded.groups for metrics in group.systems.values())
    return found, EvaluationComparison(predictions=len(predicted) + len(by_start), metrics=metrics)


def _read(path: Path) -> list[Prediction]:
    return list(read_predictions(path)) if path.is_file() else []


def _differing(
    export: Export,
    recorded: EvaluationMetrics,
    witness: Witness,
    predicted: Sequence[Prediction],
    by_start: Sequence[Prediction],
) -> Iterator[str]:
    if recorded.weights != weights_of(export.files):
        yield f"{PREDICTED} was predicted with other weights than those in the folder"
    predictions = {PREDICTED, PREDICTED_BY_START} & export.files.keys()
    if recorded.predictions != {name: export.files[name].sha256 for name in predictions}:
        yield "metrics.json is of other predictions than those in the folder"
    of_start, of_model = ([(row.id, row.source, row.reference) for row in rows] for rows in (by_start, predicted))
    if of_start and of_start != of_model:
        yield f"{PREDICTED_BY_START} is not of the same pairs as {PREDICTED}"
        return
    prefixes = {task.task: task.prefix for task in witness.trained.tasks}
    if strangers := sorted({str(row.task) for row in predicted} - prefixes.keys()):
        yield f"{PREDICTED} has predictions of tasks that the model was not trained on: {first_of(strangers)}"
        return
    vocabulary = Tokenizer.load(export.path)
    only_exact = recorded.signatures.keys() == {EXACT_MATCH}
    again = measure(predicted, by_start, prefixes, vocabulary, only_exact=only_exact)
    if again.signatures.keys() == recorded.signatures.keys() and again.signatures != recorded.signatures:
        here, there = (", ".join(sorted(set(each.values()))) for each in (again.signatures, recorded.signatures))
        raise InputError(
            f"the metrics of {export.path} are {there}, but the packages here compute {here}. Install the versions "
            "that the export was evaluated with, and certify again"
        )
    document = json.loads((export.path / EVALUATION_METRICS).read_bytes())  # where 0 is not 0.0
    expected = recorded.model_copy(update=again._asdict()).model_dump(mode="json")
    if every := list(differing_values(expected, document)):
        yield f"metrics.json is not what its predictions give: {first_of(every)}"

"""Certification computes the metrics of an export again from its predictions, and finds what does not follow."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import CertificationError, InputError
from t5train.inference.evaluation.metrics_comparison import compare_metrics
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.certificate import Certificate
from t5train.release.certification import certify, certify_in_fresh_process
from t5train.release.export import card_of
from tests.support.evaluated_exports import Evaluable

METRICS, PREDICTIONS = "evaluation/metrics.json", "evaluation/predictions.jsonl"
Change = Callable[[Any], object]


def forge(evaluated: Evaluable, name: str, change: Change) -> None:
    """Change a file of the evaluation, and make card and manifest as if that had been its content."""
    exported = evaluated.export
    path = exported.path / name
    lines = [json.loads(line) for line in path.read_text().splitlines()] if name == PREDICTIONS else None
    document = json.loads(path.read_text()) if lines is None else lines
    change(document)
    text = json.dumps(document) if lines is None else "".join(f"{json.dumps(each)}\n" for each in lines)
    path.unlink()  # it is linked to the run's folder
    path.write_text(text)
    files = exported.files | digest_files(exported.path, [name])
    card = card_of(exported.model_copy(update={"files": files}), Witness.load(evaluated.run / "witness"))
    (exported.path / "README.md").write_text(card)
    exported.model_copy(update={"files": files | digest_files(exported.path, ["README.md"])}).commit()


def certify_here(evaluated: Evaluable) -> Certificate:
    return certify(evaluated.folder, evaluated.run / "witness", compare_metrics=compare_metrics)


@pytest.mark.slow
def test_the_certificate_covers_predictions_and_says_what_was_computed_again(evaluated: Evaluable) -> None:
    certified = certify_in_fresh_process(evaluated.export, evaluated.run / "witness")
    certificate = Certificate.parse((certified.path / "certificate.json").read_bytes(), "certificate.json")
    assert certificate.files.keys() >= {METRICS, PREDICTIONS}
    assert METRICS in certificate.documents
    assert certificate.evaluation is not None
    assert certificate.evaluation.predictions == 12
    assert certificate.evaluation.metrics == 2 * 3 * 3 * 9  # splits, groups, systems, and metrics of each


def better(metrics: Any) -> None:
    metrics["groups"][0]["systems"]["model"]["chrf"]["value"] += 1


def better_hypothesis(rows: Any) -> None:
    rows[0]["hypothesis"] = rows[0]["reference"]


def other_example(metrics: Any) -> None:
    metrics["examples"][0]["hypothesis"] = "better"


def other_type(metrics: Any) -> None:
    metrics["groups"][0]["pairs"] = float(metrics["groups"][0]["pairs"])


def other_weights(metrics: Any) -> None:
    metrics["weights"]["model.safetensors"] = "0" * 64


def fewer_tokens(rows: Any) -> None:
    rows[0]["tokens"] -= 1


def no_task(rows: Any) -> None:
    rows[0]["task"] = "translate"


def no_weights(metrics: Any) -> None:
    metrics["weights"] = {}


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        (
            METRICS,
            better,
            r"is not what its predictions give: groups\[0\]\.systems\.model\.chrf\.value is",
        ),
        (METRICS, other_example, r"examples\[0\]\.hypothesis is 'better' instead of"),
        (METRICS, other_type, r"groups\[0\]\.pairs is 6\.0 instead of 6"),
        (METRICS, other_weights, "was predicted with other weights than those in the folder"),
        (METRICS, no_weights, "was predicted with other weights than those in the folder"),
        (PREDICTIONS, better_hypothesis, "is not what its predictions give"),
        (PREDICTIONS, fewer_tokens, r"metrics\.json is of other predictions than those in the folder"),
        (PREDICTIONS, no_task, "has predictions of tasks that the model was not trained on: translate"),
    ],
)
def test_metrics_that_do_not_follow_from_the_predictions_are_refused(
    evaluated: Evaluable, name: str, change: Change, found: str
) -> None:
    forge(evaluated, name, change)
    with pytest.raises(CertificationError, match=found):
        certify_here(evaluated)


def test_a_card_with_other_metrics_is_refused(evaluated: Evaluable) -> None:
    card = evaluated.folder / "README.md"
    card.write_text(card.read_text().replace("| test | all | this model | ", "| test | all | this model | 9"))
    exported = evaluated.export
    exported.model_copy(update={"files": exported.files | digest_files(exported.path, ["README.md"])}).commit()
    with pytest.raises(CertificationError, match=r"README\.md is not the card of this model: it differs from line"):
        certify_here(evaluated)


@pytest.mark.parametrize("missing", [METRICS, PREDICTIONS])
def test_predictions_without_metrics_and_metrics_without_predictions_are_refused(
    evaluated: Evaluable, missing: str
) -> None:
    exported: Export = evaluated.export
    (exported.path / missing).unlink()
    files = {name: digest for name, digest in exported.files.items() if name != missing}
    exported.model_copy(update={"files": files}).commit()
    with pytest.raises(CertificationError, match=r"do not belong to an export|files that are missing"):
        certify_here(evaluated)


def test_metrics_of_another_schema_are_refused_with_what_to_do(evaluated: Evaluable) -> None:
    exported, path = evaluated.export, evaluated.folder / METRICS
    path.unlink()
    path.write_text("{}")
    exported.model_copy(update={"files": exported.files | digest_files(exported.path, [METRICS])}).commit()
    with pytest.raises(CertificationError, match=r"metrics\.json is not the metrics of an evaluation .*evaluate again"):
        certify_here(evaluated)


def test_other_versions_of_the_packages_are_no_difference_of_the_model(evaluated: Evaluable) -> None:
    forge(evaluated, METRICS, lambda metrics: metrics["signatures"].update(chrf="chrF2|version:1.0.0"))
    with pytest.raises(InputError, match=r"version:1\.0\.0.*Install the versions that the export was evaluated with"):
        certify_here(evaluated)


def test_predictions_are_not_certified_without_the_comparison(evaluated: Evaluable, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Certify it with `certify_in_fresh_process`"):
        certify(evaluated.folder, evaluated.run / "witness")

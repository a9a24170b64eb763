"""The stage of evaluation: an export predicts held-out pairs, and gets the predictions and their metrics.

The start model, if there is one, predicts the same pairs. Predictions are kept in the run's folder, where a stage that
was killed continues.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import orjson

from t5train.data.pairs.pairs import tasks_of
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.errors import InputError
from t5train.files.atomic import replacing, write_json
from t5train.files.run_folder import PREDICTIONS, WITNESS_FOLDER
from t5train.inference.evaluation.held_out_metrics import can_score, measure
from t5train.inference.evaluation.held_out_sample import SampledPair, num_held_out, sampled_pairs
from t5train.inference.model_folder import chosen_device
from t5train.inference.predict.devices import Machines, OtherMachines
from t5train.inference.predict.prediction import VERSION, PredictJob, predict
from t5train.inference.predict.predictions import Predicted, Prediction, read_predictions
from t5train.inference.text.decoding import GenerationSpec
from t5train.model.starting_model import start_fingerprint
from t5train.progress import Progress, silent
from t5train.records.digests import digest_file
from t5train.records.evaluation_metrics import (
    EVALUATION_METRICS,
    PREDICTED,
    PREDICTED_BY_START,
    EvaluationMetrics,
    Predicting,
    recorded_metrics,
    weights_of,
)
from t5train.records.identity import fingerprint, installed_versions
from t5train.records.stage_records import Export, Pairs
from t5train.records.witness import Witness
from t5train.release.certificate import CERTIFICATE
from t5train.release.export import with_evaluation
from t5train.spec import EvaluateSpec, RunSpec
from t5train.spec.evaluate_spec import PREDICTION

_SAMPLE = "sample.jsonl"
_FILES = {PREDICTED: "predictions.jsonl", PREDICTED_BY_START: "start_predictions.jsonl"}
P = ParamSpec("P")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


def evaluate_export(
    export: Export,
    pairs: Pairs,
    spec: RunSpec,
    run: Path,
    progress: Progress = silent,
    machines: Machines = nullcontext,
) -> Export:
    """Predict held-out pairs with an export, and add the predictions and their metrics to its folder and its card.

    An export that has them, with the same settings, is returned as it is. So is a certified one, whatever it has.

    Args:
        export: The export, not yet certified.
        pairs: The pairs of the run.
        spec: The spec of the run, whose settings ``evaluate`` say how many pairs are predicted, and how.
        run: The folder of the run, with its witness.
        progress: Called with the number of sources predicted, then of sets of predictions measured.
        machines: The machines that predict. They are asked only if there is something to predict.

    Returns:
        The record of the export.

    Raises:
        InputError: A model cannot predict here.
        StorageError: A folder cannot be written.

    """
    wanted = spec.evaluate.model_dump(include=set(PREDICTION))
    recorded = recorded_metrics(export.path, export.files)
    is_as_wanted = recorded is not None and recorded.predicting.model_dump(include=set(PREDICTION)) == wanted
    if CERTIFICATE in export.files and not is_as_wanted:
        _log.warning(
            "%s was certified %s, and stays as it is. `t5-pretrain predict` and `score` measure it in other ways",
            export.path, "without predictions" if recorded is None else "with other settings of evaluate",
        )  # fmt: skip
    if CERTIFICATE in export.files or is_as_wanted:
        return export.model_copy(update={"reused": True})
    # Predictions of other weights, or with other settings or libraries, are not continued.
    identity = {
        "version": VERSION,
        "weights": weights_of(export.files),
        **wanted,
        "versions": installed_versions(("torch", "transformers")),
    }
    witness = Witness.load(run / WITNESS_FOLDER)
    folder = run / PREDICTIONS / fingerprint(identity)[:12]
    made = _evaluated(export, pairs, spec, witness, folder, progress, machines)
    return with_evaluation(export, made, witness)


def _evaluated(
    export: Export, pairs: Pairs, spec: RunSpec, witness: Witness, folder: Path, progress: Progress, machines: Machines
) -> dict[str, Path]:
    """Predict and measure in a folder, and return the files for the export by their names in it."""
    sample = list(sampled_pairs(pairs, spec.evaluate.max_pairs))
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / _SAMPLE) as file:
        file.writelines(orjson.dumps(row.pair._asdict()) + b"\n" for row in sample)
    with machines() as found:
        predicted, rows = _predicted(export, spec, sample, folder, found, witness.inputs.get("start_from"), progress)
    made = {name: folder / _FILES[name] for name in rows}
    for name, path in made.items():
        with replacing(path) as file:
            file.writelines(row.line() for row in rows[name])
    digests = {name: digest_file(path).sha256 for name, path in made.items()}
    metrics = _metrics(export, pairs, spec, predicted, rows, digests, progress)
    made[EVALUATION_METRICS] = folder / "metrics.json"
    write_json(made[EVALUATION_METRICS], metrics.model_dump(mode="json"))
    return made


def _predicted(
    export: Export,
    spec: RunSpec,
    sample: Sequence[SampledPair],
    folder: Path,
    machines: OtherMachines | None,
    started_from: str | None,
    progress: Progress,
) -> tuple[Predicted, dict[str, list[Prediction]]]:
    """Predict the sample with the export and the start model, and return the rows by their names in the export.

    ``started_from`` is the fingerprint of the start model when training began.
    """
    device = "cpu" if spec.cluster.accelerator == "cpu" else None
    kind = machines.device if machines else chosen_device(device)  # it may be another than before an interruption
    job = PredictJob(
        model=export.path,
        files=[f"{folder / _SAMPLE}#prefix="],  # sources have theirs
        out=folder / f"model-{kind}",
        decoding=_decoding(spec.evaluate),
        device=device,
        tokens_setting="evaluate.max_new_tokens",
        less_memory="Set a lower evaluate.num_beams or evaluate.max_new_tokens",
        root=spec.storage.root,
        machines=partial(nullcontext, machines),
    )
    predicted = _advised(predict, job, progress)
    rows = {PREDICTED: _rows(job.out, sample)}
    if (start := spec.model.start_from) is None:
        return predicted, rows
    if not Path(start).is_dir():
        _log.warning("%s, which training started from, is gone: it is not measured", start)
    elif _advised(start_fingerprint, spec.model, progress) != started_from:
        _log.warning("%s is not the model any more that training started from: it is not measured", start)
    else:
        of_start = job._replace(model=Path(start), out=folder / f"start-{kind}")
        _advised(predict, of_start, progress)
        rows[PREDICTED_BY_START] = _rows(of_start.out, sample)
    return predicted, rows


def _advised(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Call a function. An InputError that it raises says how to do without predictions."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        raise InputError(f"{error}. To publish without predictions, set evaluate.max_pairs=0") from error


def _decoding(spec: EvaluateSpec) -> GenerationSpec:
    return GenerationSpec(
        max_new_tokens=spec.max_new_tokens, num_beams=spec.num_beams, length_penalty=spec.length_penalty
    )


def _rows(folder: Path, sample: Sequence[SampledPair]) -> list[Prediction]:
    """Return the predictions of the sample, with its ids and tasks."""
    rows = zip(read_predictions(folder), sample, strict=True)
    return [row.model_copy(update={"id": sampled.id, "task": sampled.task}) for row, sampled in rows]


def _metrics(
    export: Export,
    pairs: Pairs,
    spec: RunSpec,
    predicted: Predicted,
    rows: dict[str, list[Prediction]],
    digests: dict[str, str],
    progress: Progress,
) -> EvaluationMetrics:
    if only_exact := not can_score():
        _log.warning(
            "only exact match is measured: chrF, BLEU, ROUGE and token F1 need sacrebleu and rouge-score. Install "
            "t5-pretrain[score] before the next run"
        )
    measured = measure(
        *(rows[PREDICTED], rows.get(PREDICTED_BY_START, []), {each.task: each.prefix for each in tasks_of(pairs)}),
        Tokenizer.load(export.path),
        only_exact=only_exact,
        progress=progress,
    )
    settings: dict[str, Any] = spec.evaluate.model_dump(include=set(PREDICTION))
    return EvaluationMetrics(
        weights=weights_of(export.files),
        predictions=digests,
        predicting=Predicting(
            **settings, most_tokens=predicted.max_new_tokens, device=predicted.device, dtype=predicted.dtype
        ),
        held_out=num_held_out(pairs),
        **measured._asdict(),
    )

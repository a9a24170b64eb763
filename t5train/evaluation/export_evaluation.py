"""The stage of evaluation: an export predicts held-out pairs, and gets the predictions and their metrics.

The start model, if there is one, predicts the same pairs. Predictions are kept in the run's folder until the export has
them, so that a killed stage continues.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t5train.data.pairs.pairs import tasks_of
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.evaluation.held_out_metrics import can_score, measure
from t5train.evaluation.held_out_sample import SampledPair, num_held_out, sampled_pairs
from t5train.files.atomic import replacing, write_json
from t5train.files.run_folder import PREDICTIONS
from t5train.predict.decoding import Decoder
from t5train.predict.predictions import Prediction, read_predictions
from t5train.progress import Progress, silent
from t5train.records.evaluation_metrics import (
    EVALUATION_METRICS,
    PREDICTED,
    PREDICTED_BY_START,
    EvaluationMetrics,
    Predicting,
    is_weights,
    recorded_metrics,
)
from t5train.records.stage_records import Export, Pairs
from t5train.records.witness import Witness
from t5train.release.certificate import CERTIFICATE
from t5train.release.export import with_evaluation
from t5train.release.inference.generation import GenerationSpec
from t5train.release.inference.model_folder import ModelFolder, chosen_device
from t5train.spec import RunSpec
from t5train.spec.evaluate_spec import PREDICTION

_log = logging.getLogger(__name__)


def evaluate_export(export: Export, pairs: Pairs, spec: RunSpec, witness: Path, progress: Progress = silent) -> Export:
    """Predict held-out pairs with an export, and add the predictions and their metrics to its folder and its card.

    An export that has them, with the same settings, is returned as it is. So is a certified one, whatever it has.

    Args:
        export: The export, not yet certified.
        pairs: The pairs of the run.
        spec: The spec of the run, whose settings ``evaluate`` say how many pairs are predicted, and how.
        witness: Folder ``witness`` in the run's folder.
        progress: Called with the number of predicted pairs, then of systems measured.

    Returns:
        The record of the export.

    Raises:
        InputError: The start model is not there any more or cannot predict.
        StorageError: The export's folder cannot be written.

    """
    wanted = {name: getattr(spec.evaluate, name) for name in PREDICTION}
    wanted["max_new_tokens"] = spec.evaluate.max_new_tokens or spec.pairs.target_tokens
    recorded = recorded_metrics(export.path, export.files)
    is_as_wanted = recorded is not None and wanted == recorded.predicting.model_dump(include={*wanted})
    if CERTIFICATE in export.files and not is_as_wanted:
        _log.warning(
            "%s was certified %s, and stays as it is. `t5-pretrain predict` and `score` measure it in other ways",
            export.path, "without predictions" if recorded is None else "with other settings of evaluate",
        )  # fmt: skip
    if CERTIFICATE in export.files or is_as_wanted:
        return export.model_copy(update={"reused": True})
    made = _made(export, pairs, spec, wanted, progress)
    return with_evaluation(export, made, Witness.load(witness))


def _made(
    export: Export, pairs: Pairs, spec: RunSpec, wanted: Mapping[str, Any], progress: Progress
) -> dict[str, Path]:
    """Predict and measure, and return the files for the export by their names in it."""
    sample = list(sampled_pairs(pairs, spec.evaluate.max_pairs))
    settings = GenerationSpec(
        max_new_tokens=wanted["max_new_tokens"],
        num_beams=wanted["num_beams"],
        length_penalty=wanted["length_penalty"],
    )
    device = chosen_device("cpu" if spec.cluster.accelerator == "cpu" else None)
    folder = spec.run_folder / PREDICTIONS
    made = {PREDICTED: _predict(export.path, sample, settings, device, folder / "model", progress)}
    if spec.model.start_from is not None:
        start = Path(spec.model.start_from)
        made[PREDICTED_BY_START] = _predict(start, sample, settings, device, folder / "start", progress)
    rows = {name: list(read_predictions(file)) for name, file in made.items()}
    only_exact = not can_score()
    if only_exact:
        _log.warning(
            "only exact match is measured: BLEU, chrF, ROUGE and token F1 need sacrebleu and rouge-score. Install "
            "t5-pretrain[score] before the next run"
        )
    measured = measure(
        *(rows[PREDICTED], rows.get(PREDICTED_BY_START, []), {each.task: each.prefix for each in tasks_of(pairs)}),
        Tokenizer.load(export.path),
        only_exact=only_exact,
        progress=progress,
    )
    metrics = EvaluationMetrics(
        weights={name: digest.sha256 for name, digest in export.files.items() if is_weights(name)},
        predicting=Predicting(**wanted, device=device.partition(":")[0], dtype="float32"),
        held_out=num_held_out(pairs),
        **measured._asdict(),
    )
    made[EVALUATION_METRICS] = folder / "metrics.json"
    write_json(made[EVALUATION_METRICS], metrics.model_dump(mode="json"))
    return made


def _predict(
    model: Path,
    sample: Sequence[SampledPair],
    spec: GenerationSpec,
    device: str,
    out: Path,
    progress: Progress,
) -> Path:
    """Predict the pairs, and return the file of predictions."""
    decoder, found = Decoder(ModelFolder.open(model), device), dict[int, Prediction]()
    order = sorted(range(len(sample)), key=lambda number: len(sample[number].pair.source))
    for start in range(0, len(order), 32):
        numbers = order[start : start + 32]
        texts = decoder.decode([sample[number].pair.source for number in numbers], spec, 64)
        for number, each in zip(numbers, texts, strict=True):
            row = sample[number]
            found[number] = Prediction(
                id=row.id,
                task=row.task,
                source=row.pair.source,
                reference=row.pair.target,
                hypothesis=each.text,
                tokens=each.tokens,
                ended=each.ended,
            )
        progress("pairs predicted", len(found), len(sample))
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "predictions.jsonl") as file:
        file.writelines(found[number].line() for number in range(len(sample)))
    return out / "predictions.jsonl"

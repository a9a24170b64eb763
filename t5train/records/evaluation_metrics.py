"""What the predictions of an export on held-out pairs are worth: ``evaluation/metrics.json`` in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.errors import RecordError
from t5train.records.digests import FileDigest

_FOLDER = "evaluation"
EVALUATION_METRICS, PREDICTED = f"{_FOLDER}/metrics.json", f"{_FOLDER}/predictions.jsonl"
PREDICTED_BY_START = f"{_FOLDER}/start_predictions.jsonl"
"""What the model that training started from predicts for the same pairs."""
EVALUATION_FILES = frozenset({EVALUATION_METRICS, PREDICTED, PREDICTED_BY_START})
SYSTEMS = {
    "model": "this model",
    "start": "the model that training started from",
    "copy": "the source, copied",
    "shuffled": "this model, given the source of another pair",
}
"""What is measured on the same references: the model, and what it has to be better than."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Metric(_Part):
    """A metric, rounded to four decimals, and the ends of its 95% interval if there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def with_interval(self) -> str:
        """The value and its interval, as tables show them."""
        return f"{self.value:.2f}" + ("" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})")


class GroupMetrics(_Part):
    """The metrics of a task in a split, by system and name. ``task`` is None for all tasks of several together."""

    split: Literal["validation", "test"]
    task: str | None
    pairs: int
    """Predicted pairs."""
    not_ended: int
    """Predictions of the model that were cut off at the largest number of tokens."""
    unknown: int
    """References with an unknown piece, which no prediction can match."""
    systems: dict[str, dict[str, Metric]]


class Example(_Part):
    """A predicted pair."""

    split: Literal["validation", "test"]
    task: str
    source: str
    reference: str
    hypothesis: str


class Predicting(_Part):
    """How held-out pairs were chosen and predicted: the settings ``evaluate``, and where."""

    max_pairs: int
    num_beams: int
    max_new_tokens: int | None
    length_penalty: float
    most_tokens: int
    """So many tokens were allowed: ``max_new_tokens`` or, if it was not set, as many as the references need."""
    device: str
    dtype: str


class EvaluationMetrics(_Part):
    """The content of ``metrics.json``. All but the first five fields follow from the predictions and the vocabulary.

    ``weights`` has the sha256 of each file of weights that predicted, ``predictions`` that of each file of predictions
    in the export, ``held_out`` the number of pairs in each split, predicted or not, and ``signatures`` what the metrics
    are, by name, with the versions of the packages.
    """

    schema_version: Literal[1] = 1
    weights: dict[str, str]
    predictions: dict[str, str]
    predicting: Predicting
    held_out: dict[str, int]
    signatures: dict[str, str]
    groups: tuple[GroupMetrics, ...]
    examples: tuple[Example, ...]

    @property
    def names(self) -> set[str]:
        """The names of the files of the evaluation, in the folder of the export."""
        by_start = {PREDICTED_BY_START} if any("start" in group.systems for group in self.groups) else set()
        return {EVALUATION_METRICS, PREDICTED, *by_start}


def weights_of(files: Mapping[str, FileDigest]) -> dict[str, str]:
    """Return the sha256 of each file of an export that has weights of the model itself."""
    return {name: digest.sha256 for name, digest in files.items() if name.endswith(".safetensors") and "/" not in name}


def recorded_metrics(folder: Path, files: Mapping[str, FileDigest]) -> EvaluationMetrics | None:
    """Return the metrics of an export, None if it was not evaluated. Raises RecordError if they cannot be parsed."""
    if EVALUATION_METRICS not in files:
        return None
    path = folder / EVALUATION_METRICS
    try:
        return EvaluationMetrics.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RecordError(
            f"{path} is not the metrics of an evaluation ({error.errors()[0]['msg']}). Export and evaluate again"
        ) from error

"""The file of predictions: one JSON object a line, in the order of the rows that were predicted."""

from collections.abc import Iterator
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t5train.errors import InputError
from t5train.spec.settings import explain

PREDICTIONS, PREDICTION = "predictions.jsonl", "prediction.json"
"""Names of the two files of a folder of predictions: the predictions themselves, and how they were made."""


class Prediction(BaseModel):
    """What a model wrote for one row. ``tokens`` counts generated tokens with EOS, without padding and the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    id: str
    task: str | None
    source: str
    """As the model read it, with the prefix of its task."""
    reference: str | None
    hypothesis: str
    tokens: int = Field(ge=0)
    ended: bool
    """Whether EOS was generated: if not, the hypothesis was cut at the most tokens that were allowed."""

    def line(self) -> bytes:
        """Return the prediction as a line of a file of predictions."""
        return orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def read_predictions(path: Path) -> Iterator[Prediction]:
    """Yield the predictions of a file, or of a folder that has one, in its order.

    Raises InputError, naming the line, if one is not a prediction; and if there is no such file.
    """
    file = path / PREDICTIONS if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} is not a file of predictions. Name one, or the folder that `predict` wrote")
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _parsed(file, number, line)


def _parsed(file: Path, number: int, line: bytes) -> Prediction:
    try:
        return Prediction.model_validate(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        said = f"it is not JSON: {error.msg}, at column {error.colno}"
    except ValidationError as error:
        said = explain(error)
    raise InputError(f"{file} line {number} is not a prediction ({said}). Predict again, or correct this line")

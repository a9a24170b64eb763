"""The file of predictions: one JSON object a line, in the order of the rows that were predicted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t5train.errors import InputError
from t5train.inference.model_folder import DType
from t5train.spec.pairs_spec import TASK_NAME
from t5train.spec.settings import explain

PREDICTIONS, PREDICTION = "predictions.jsonl", "prediction.json"
"""Names of the two files of a folder of predictions: the predictions themselves, and how they were made."""


class Prediction(BaseModel):
    """What a model wrote for one row. ``tokens`` counts generated tokens with EOS, without padding and the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    id: str
    task: Annotated[str, Field(pattern=TASK_NAME)] | None
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


class Predicted(BaseModel):
    """The content of ``prediction.json``: how predictions were made, and what they amount to."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    fingerprint: str
    """Of the model, the rows, and all settings that decide the predictions."""
    model: str
    """The name of the model's folder."""
    weights: dict[str, str]
    """The digest of each file with weights."""
    tasks: dict[str, str]
    """The prefix of each task that was predicted, by its name."""
    decoding: dict[str, Any]
    """``num_beams`` and, of several, ``length_penalty``; with ``sample``, ``temperature``, ``top_p`` and ``seed``."""
    max_new_tokens: int
    max_new_tokens_from: Literal["setting", "references", "training"]
    batch_tokens: int
    device: str
    """Its kind, such as cpu."""
    dtype: DType
    versions: dict[str, str]
    rows: int
    long_sources: int
    """Sources with more tokens than those of training, which were read whole."""
    doubled_prefixes: int
    """Sources that began with the prefix of their task already, and have it twice."""
    missing_prefixes: int
    """Sources that begin with no prefix of the tasks that the model was fine-tuned on."""
    not_ended: int
    """Hypotheses that were cut at ``max_new_tokens``."""
    sha256: str
    """Of the file of predictions."""


def read_predictions(path: Path) -> Iterator[Prediction]:
    """Yield the predictions of a file or a pipe, or of a folder that has a file, in its order.

    Raises InputError, naming the line, if one is not a prediction; and if there is no such file, or none in it.
    """
    file, number = path / PREDICTIONS if path.is_dir() else path, 0
    if not (file.is_file() or file.is_fifo()):
        raise InputError(
            f"{file} is not a file of predictions. Name one, the folder that `predict` wrote, or `evaluation` "
            "in a model that was fine-tuned"
        )
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _parsed(file, number, line)
    if not number:
        raise InputError(f"{file} is empty. Predict again, or name another file")


def _parsed(file: Path, number: int, line: bytes) -> Prediction:
    try:
        return Prediction.model_validate(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        said = f"it is not JSON: {error.msg}, at column {error.colno}"
    except ValidationError as error:
        said = explain(error)
    raise InputError(f"{file} line {number} is not what `predict` writes ({said}). Predict again, or correct this line")

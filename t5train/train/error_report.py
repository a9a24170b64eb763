"""How a rank tells whoever launched it which error ended it, in a file of the attempt's folder."""

import json
from pathlib import Path

from t5train import errors
from t5train.atomic import write_json
from t5train.errors import T5TrainError


def report(attempt_folder: Path, rank: int, error: BaseException) -> None:
    """Leave ``error`` for the launching process to raise as its own.

    Only this project's errors are left: their text is fit to show; any other is explained by its traceback
    in the rank's log.
    """
    if isinstance(error, T5TrainError):
        write_json(_path(attempt_folder, rank), {"type": type(error).__name__, "message": str(error)})


def read(attempt_folder: Path, rank: int) -> T5TrainError | None:
    """The error that ``rank`` reported, of its own class; None if it reported none."""
    try:
        reported = json.loads(_path(attempt_folder, rank).read_text("utf-8"))
    except FileNotFoundError:
        return None
    kind = getattr(errors, reported["type"])
    if not (isinstance(kind, type) and issubclass(kind, T5TrainError)):
        raise TypeError(f"{_path(attempt_folder, rank)} names {reported['type']!r}, which is no error of this project")
    return kind(reported["message"])


def _path(attempt_folder: Path, rank: int) -> Path:
    return attempt_folder / f"rank-{rank:05d}.error.json"

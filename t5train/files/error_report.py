"""Report the error that ended a rank to the process that launched it, in one of the rank's files.

``rank_files`` is the prefix of these files' paths, such as ``.../rank-00003`` (t5train.files.run_folder.RANK_FILES).
"""

import json
from pathlib import Path

from t5train.errors import StorageError, T5TrainError, error_of
from t5train.files.atomic import write_json
from t5train.files.os_errors import of_rank


def report(rank_files: Path, error: BaseException) -> None:
    """Write ``error`` to a file for the launching process to raise as its own.

    Only this project's errors and disk errors are written; for any other, the rank's log has the traceback.
    """
    if (reported := reportable(error)) is not None:
        write_json(_path(rank_files), {"type": type(reported).__name__, "message": str(reported)})


def reportable(error: BaseException) -> T5TrainError | None:
    """The error to report: a T5TrainError unchanged, a disk error with an explanation; None for any other."""
    if isinstance(error, OSError | StorageError) and not isinstance(error, ConnectionError | TimeoutError):
        return of_rank(error)
    return error if isinstance(error, T5TrainError) else None


def read(rank_files: Path) -> T5TrainError | None:
    """The error that the rank reported, of its own class; None if it reported none."""
    try:
        reported = json.loads(_path(rank_files).read_text("utf-8"))
    except FileNotFoundError:
        return None
    return error_of(reported["type"], reported["message"])


def _path(rank_files: Path) -> Path:
    return rank_files.with_name(f"{rank_files.name}.error.json")

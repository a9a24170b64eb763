import errno
import json
import os
from pathlib import Path

import pytest

from t5train.errors import DiskFull, RanksDisagree, StorageError, T5TrainError
from t5train.rank import error_report


def test_an_error_of_this_project_is_read_back_unchanged(tmp_path: Path) -> None:
    error_report.report(tmp_path / "rank-00003", RanksDisagree("rank 3 resumed from step 7, rank 0 from step 8"))
    error = error_report.read(tmp_path / "rank-00003")
    assert type(error) is RanksDisagree
    assert str(error) == "rank 3 resumed from step 7, rank 0 from step 8"


def test_a_storage_error_keeps_its_message_and_gets_the_class_of_its_cause(tmp_path: Path) -> None:
    full = StorageError("/r/file: No space left on device; free some space")
    full.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/r/.file.0a1b.tmp")
    error_report.report(tmp_path / "rank-00000", full)
    error = error_report.read(tmp_path / "rank-00000")
    assert type(error) is DiskFull
    assert str(error) == "/r/file: No space left on device; free some space"


def test_an_error_of_another_kind_is_not_reported(tmp_path: Path) -> None:
    error_report.report(tmp_path / "rank-00000", RuntimeError("Connection reset by peer"))
    assert error_report.read(tmp_path / "rank-00000") is None


@pytest.mark.parametrize("name", ["ClassVar", "annotations", "OfALaterVersion"])
def test_a_report_with_an_unknown_class_keeps_its_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "rank-00000.error.json").write_text(json.dumps({"type": name, "message": "what happened"}))
    error = error_report.read(tmp_path / "rank-00000")
    assert type(error) is T5TrainError
    assert str(error) == "what happened"

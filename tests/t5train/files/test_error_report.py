import errno
import json
import os
from pathlib import Path

import pytest

from t5train.errors import DiskFull, RanksDisagree, StorageError, T5TrainError
from t5train.files import error_report

FULL = StorageError("/r/file: No space left on device; free some space")
FULL.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/r/.file.0a1b.tmp")
DISAGREE = RanksDisagree("rank 3 resumed from step 7, rank 0 from step 8")


@pytest.mark.parametrize(("error", "kind"), [(DISAGREE, RanksDisagree), (FULL, DiskFull)])
def test_an_error_of_this_project_keeps_its_message_and_gets_the_class_of_its_cause(
    tmp_path: Path, error: T5TrainError, kind: type[T5TrainError]
) -> None:
    error_report.report(tmp_path / "rank-00003", error)
    found = error_report.read(tmp_path / "rank-00003")
    assert (type(found), str(found)) == (kind, str(error))


def test_an_error_of_another_kind_is_not_reported(tmp_path: Path) -> None:
    error_report.report(tmp_path / "rank-00000", RuntimeError("Connection reset by peer"))
    assert error_report.read(tmp_path / "rank-00000") is None


@pytest.mark.parametrize("name", ["ClassVar", "annotations", "OfALaterVersion"])
def test_a_report_with_an_unknown_class_keeps_its_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "rank-00000.error.json").write_text(json.dumps({"type": name, "message": "what happened"}))
    error = error_report.read(tmp_path / "rank-00000")
    assert type(error) is T5TrainError
    assert str(error) == "what happened"

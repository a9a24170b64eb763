"""The folders of nights: which are old, which is the newest, one night at a time, and the history of all nights."""

from pathlib import Path

import pytest

from t5train.errors import RegressionError
from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_results import Finding
from t5train.regression.regression_findings import STEP
from tests.support.night_cases import case_result, night_result


@pytest.fixture
def regression(tmp_path: Path) -> RegressionFolder:
    found = RegressionFolder(tmp_path)
    for name in ("20261121-020000", "20261122-020000", "20261123-020000"):
        (found.nights_path / name).mkdir(parents=True)
    return found


def test_all_but_the_newest_nights_are_surplus(regression: RegressionFolder) -> None:
    (regression.nights_path / "my-notes").mkdir()
    assert [folder.name for folder in regression.surplus_nights(2)] == ["20261121-020000"]
    assert regression.surplus_nights(3) == []
    folder = regression.begin_night()
    assert regression.nights()[-1] == folder
    assert list(folder.iterdir()) == []


def test_the_newest_night_with_results_is_shown(regression: RegressionFolder) -> None:
    with pytest.raises(RegressionError, match="no night has ended"):
        regression.night(None)
    for folder in regression.nights()[:2]:
        night_result(case_result(), night=folder.name).write(folder)
    assert regression.night(None).name == "20261122-020000"
    assert regression.night("20261121-020000").name == "20261121-020000"
    with pytest.raises(RegressionError, match="no night called '20261123-020000' has ended"):
        regression.night("20261123-020000")


def test_a_second_night_at_the_same_time_is_refused_with_the_lock(regression: RegressionFolder) -> None:
    refused = pytest.raises(RegressionError, match=f"{regression.path / 'lock'} is locked by process")
    with regression.locked(), refused, RegressionFolder(regression.path.parent).locked():
        pass
    with regression.locked():
        pass


def test_every_night_adds_a_line_for_each_case(regression: RegressionFolder) -> None:
    slow = Finding(case="moe", about="time", sentence="moe: slow")
    regression.append_history(night_result(case_result("smoke"), case_result("moe"), findings=(slow,)))
    regression.append_history(night_result(case_result("smoke"), night="20261124-021500"))
    lines = regression.history()
    assert [(line.night[:8], line.case, line.passed) for line in lines] == [
        ("20261123", "smoke", True),
        ("20261123", "moe", False),
        ("20261124", "smoke", True),
    ]
    assert lines[0].compared[STEP].tonight == 1.6


def test_a_damaged_line_is_named_and_left_out(regression: RegressionFolder, caplog: pytest.LogCaptureFixture) -> None:
    path = regression.history_path
    regression.append_history(night_result(case_result("smoke")))
    path.write_text(path.read_text() + '{"night": "2026')  # the disk was full
    regression.append_history(night_result(case_result("moe")))
    assert [line.case for line in regression.history()] == ["smoke", "moe"]
    assert f"line 2 of {path} is damaged" in caplog.text

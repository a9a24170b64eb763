"""The history of all nights, as lines and as a picture."""

from pathlib import Path

import pytest

from t5train.regression import night_history
from t5train.regression.baselines import Baselines
from t5train.regression.history_plot import MAX_BYTES, history_png
from t5train.regression.night_results import Finding
from t5train.regression.regression_cases import CASES, HOSTFILE_CASE
from t5train.regression.regression_findings import STEP
from tests.support.night_cases import case_result, night_result


def test_every_night_adds_a_line_for_each_case(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    slow = Finding(case="moe", about="time", sentence="moe: slow")
    night_history.append(path, night_result(case_result("smoke"), case_result("moe"), findings=(slow,)))
    night_history.append(path, night_result(case_result("smoke"), night="20261124-021500"))
    lines = night_history.read(path)
    assert [(line.night[:8], line.case, line.passed) for line in lines] == [
        ("20261123", "smoke", True),
        ("20261123", "moe", False),
        ("20261124", "smoke", True),
    ]
    assert lines[0].compared[STEP].tonight == 1.6


def test_a_damaged_line_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history.jsonl"
    night_history.append(path, night_result(case_result("smoke")))
    path.write_text(path.read_text() + '{"night": "2026')  # the disk was full
    night_history.append(path, night_result(case_result("moe")))
    assert [line.case for line in night_history.read(path)] == ["smoke", "moe"]
    assert f"line 2 of {path} is damaged" in caplog.text


def test_the_picture_of_ninety_nights_of_all_cases_fits_into_an_artifact(tmp_path: Path) -> None:
    results = [case_result(name) for name in (*(case.name for case in CASES), HOSTFILE_CASE)]
    for number in range(90):
        night = f"2026{1 + number // 28:02}{1 + number % 28:02}-021500"
        night_history.append(tmp_path / "history.jsonl", night_result(*results, night=night))
    baselines = Baselines(tmp_path / "baselines")
    baselines.accept("20260210-021500", results[0], "faster")
    png = history_png(results, night_history.read(tmp_path / "history.jsonl"), baselines.history())
    assert png.startswith(b"\x89PNG")
    assert len(png) * 4 / 3 < MAX_BYTES

"""The report of a night, and the picture of all nights."""

from pathlib import Path

import pytest

from t5train.errors import RegressionError
from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_report import MAX_PLOT_BYTES, headline, history_png, markdown, rows
from t5train.regression.night_results import RESULTS, Finding, NightResult
from t5train.regression.regression_cases import CASES, HOSTFILE_CASE
from t5train.regression.regression_findings import PEER, STEP, compared
from tests.support.night_cases import case_result, measured, night_result

SLOW = Finding(case="moe", about="time", sentence="moe: slow")
WRONG = Finding(case="moe", about="loss", sentence="moe: the loss of step 2 | of *.pt changed")


def test_rows_show_what_is_worse_and_what_is_not() -> None:
    slow = case_result(measured={STEP: measured(3.2)})
    night = night_result(slow, findings=(WRONG, SLOW))
    night = night.model_copy(update={"compared": {"moe": compared(slow, case_result())}})
    assert [(row["quantity"], row["verdict"]) for row in rows(night)] == [
        ("loss", "the loss of step 2 | of *.pt changed"),
        (STEP, "worse"),
    ]
    assert rows(night)[1] == {
        "case": "moe", "quantity": STEP, "tonight": "3.20 x peer", "baseline": "1.60 x peer", "change": "+100%",
        "allowed": "+15%", "verdict": "worse",
    }  # fmt: skip


def test_a_quantity_that_varies_too_much_is_not_ok() -> None:
    noisy = case_result(measured={STEP: measured(1.0, 1.1, 5.5), PEER: measured(4.0)})
    night = night_result(noisy)
    assert [row["verdict"] for row in rows(night)[1:]] == ["varies too much", "ok"]
    assert rows(night)[2]["tonight"] == "4.00 x hash"
    first = night.model_copy(update={"compared": {"moe": compared(noisy, None)}})
    assert [row["verdict"] for row in rows(first)[1:]] == ["varies too much", "no baseline"]


def test_the_report_begins_with_the_findings() -> None:
    night = night_result(case_result(), findings=(WRONG, SLOW))
    assert headline(night) == WRONG.sentence
    text = markdown(night)
    assert text.index("- moe: the loss of step 2 | of \\*.pt changed\n- moe: slow") < text.index("| case | quantity |")
    assert "the loss of step 2 \\| of \\*.pt changed |" in text
    assert "Nothing got worse." in markdown(night_result(case_result()))


def test_the_headline_names_cases_that_were_compared_with_nothing() -> None:
    without, result = case_result("smoke"), case_result()
    night = night_result(result, without)
    night = night.model_copy(update={"compared": {"moe": compared(result, result), "smoke": compared(without, None)}})
    assert headline(night).endswith("nothing got worse; compared with nothing, because there was no baseline: smoke")


def test_results_are_read_as_they_were_written_and_missing_or_damaged_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(RegressionError, match="did not end"):
        NightResult.read(tmp_path)
    night = night_result(case_result(), findings=(SLOW,))
    night.write(tmp_path)
    assert NightResult.read(tmp_path) == night
    (tmp_path / RESULTS).write_text("{}")
    with pytest.raises(RegressionError, match="is damaged"):
        NightResult.read(tmp_path)


def test_the_picture_of_ninety_nights_of_all_cases_fits_into_an_artifact(tmp_path: Path) -> None:
    regression = RegressionFolder(tmp_path)
    regression.path.mkdir()
    results = [case_result(name) for name in (*(case.name for case in CASES), HOSTFILE_CASE)]
    for number in range(90):
        night = f"2026{1 + number // 28:02}{1 + number % 28:02}-021500"
        regression.append_history(night_result(*results, night=night))
    regression.baselines.accept("20260210-021500", results[0], "faster")
    png = history_png(results, regression.history(), regression.baselines.history())
    assert png.startswith(b"\x89PNG")
    assert len(png) * 4 / 3 < MAX_PLOT_BYTES

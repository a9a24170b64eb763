"""What a night compares its results with, and which baseline it records."""

from pathlib import Path

import pytest

from infra.head.regression import night_run
from infra.head.regression.night_run import Night, begin_night
from t5train.errors import RegressionError, SpecError
from t5train.progress import silent
from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_results import CaseResult, NightResult
from t5train.regression.regression_findings import SAVING, STEP
from tests.support.night_cases import MACHINE, case_result, measured

OLD, NEW = MACHINE | {"torch": "2.12.0"}, MACHINE | {"torch": "2.13.0"}
ROUNDED = [[("loss of step 1", 6.5 * (1 + 1e-6))]]


@pytest.fixture
def regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RegressionFolder:
    monkeypatch.setattr(night_run, "history_png", lambda *_: b"a picture")
    return RegressionFolder(tmp_path)


def concluded(regression: RegressionFolder, night: int, *results: CaseResult) -> NightResult:
    """Conclude a night with these results."""
    begun = Night.__new__(Night)
    folder = regression.nights_path / f"20261123-0215{night:02}"
    folder.mkdir(parents=True)
    vars(begun).update(folder=folder, _regression=regression, _keep=14, _started=0.0)
    return begun.conclude(results, silent)


def test_the_first_night_after_an_upgrade_is_compared_with_the_old_baseline(regression: RegressionFolder) -> None:
    first = concluded(regression, 1, case_result(machine=OLD, curves=[[("loss of step 1", 6.5)]]))
    assert (first.passed, first.notes) == (True, ["moe: no baseline for this machine: recorded"])
    rounded = concluded(regression, 2, case_result(machine=NEW, curves=ROUNDED))
    assert rounded.passed
    [note] = rounded.notes
    assert note.startswith("moe: compared with the baseline of other versions (torch 2.12.0 -> 2.13.0)")
    doubled = concluded(regression, 3, case_result(machine=NEW, curves=[[("loss of step 1", 13.0)]]))
    assert not doubled.passed
    assert len(regression.baselines.history()) == 1, "only `accept` makes an upgrade the baseline"


def test_quantities_that_only_one_side_has_are_named(regression: RegressionFolder) -> None:
    concluded(regression, 1, case_result())
    [new, lacking] = concluded(regression, 2, case_result(measured={STEP: measured(1.6), SAVING: measured(9.0)})).notes
    assert new.startswith("moe: not checked, because the baseline lacks them: saving. Accept")
    assert lacking == "moe: not checked, because they were not measured: host memory"


def test_a_first_night_whose_repeats_differ_too_much_records_no_baseline(regression: RegressionFolder) -> None:
    noisy = concluded(regression, 1, case_result(measured={STEP: measured(1.0, 1.1, 5.5)}))
    assert not noisy.passed
    assert noisy.notes == ["moe: no baseline for this machine; none recorded, because of what was found"]
    assert regression.baselines.history() == []


def test_relative_paths_are_refused_because_a_worker_has_another_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=1\n")
    both = ((Path("work"), None, "root is 'work'"), (tmp_path, Path("hosts"), "hostfile is 'hosts'"))
    for root, hostfile, said in both:
        with pytest.raises(SpecError, match=f"{said}, a relative path"), begin_night(root, None, hostfile, 14):
            pytest.fail("the night began")


def test_a_damaged_baseline_is_found_before_the_night_trains(regression: RegressionFolder, tmp_path: Path) -> None:
    regression.baselines.folder.mkdir(parents=True)
    (regression.baselines.folder / "20261123T021500000000-moe-12345678.json").write_text("{")
    with pytest.raises(RegressionError, match=r"damaged .* Move the file away"), begin_night(tmp_path, None, None, 14):
        pytest.fail("the night began")
    assert regression.nights() == []

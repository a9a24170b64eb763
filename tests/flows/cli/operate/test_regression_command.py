"""``regression``: what is refused, shown and accepted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_results import Finding
from t5train.regression.regression_findings import STEP
from tests.support.night_cases import NIGHT, case_result, measured, night_result

T5Pretrain = Callable[..., int]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a night in which moe was slow and smoke could not be resumed."""
    slow = Finding(case="moe", about="time", sentence="moe: a step takes 2.10 times the peer's")
    folder = RegressionFolder(tmp_path).nights_path / NIGHT
    folder.mkdir(parents=True)
    broken = case_result("smoke", problems=["resuming failed: no checkpoint"])
    night_result(case_result("moe"), broken, findings=(slow,)).write(folder)
    return tmp_path


def test_a_night_with_findings_is_shown_with_exit_code_1(root: Path, printed: Callable[..., str]) -> None:
    shown = printed("regression", "show", "--root", str(root), code=1)
    assert "moe\tstep\t1.60 x peer\t1.60 x peer\t+0%\t+15%\tok" in shown
    assert "moe: a step takes 2.10 times the peer's\n" in shown


def test_a_night_is_accepted_with_its_reason_except_for_what_failed(
    root: Path, t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str]
) -> None:
    assert t5_pretrain("regression", "accept", "--root", str(root), "--why", "more experts") == 1
    said = capsys.readouterr()
    assert said.out == f"accepted: moe of {NIGHT}\n"
    assert said.err == "not accepted: smoke: resuming failed: no checkpoint\n"
    [baseline] = RegressionFolder(root).baselines.history()
    assert (baseline.result.case, baseline.why, baseline.night) == ("moe", "more experts", NIGHT)


def test_a_root_without_nights_and_a_night_that_runs_have_their_own_exit_codes(
    root: Path, tmp_path: Path, t5_pretrain: T5Pretrain
) -> None:
    assert t5_pretrain("regression", "show", "--root", str(tmp_path / "empty")) == 4
    with RegressionFolder(root).locked():
        assert t5_pretrain("regression", "accept", "--root", str(root), "--why", "x") == 6


def test_a_night_whose_repeats_differ_too_much_is_not_accepted(
    root: Path, t5_pretrain: T5Pretrain, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = case_result("zero2", measured={STEP: measured(1.0, 1.1, 5.5)})
    night_result(noisy).write(RegressionFolder(root).nights_path / NIGHT)
    assert t5_pretrain("regression", "accept", "--root", str(root), "--why", "x") == 1
    assert capsys.readouterr().err.startswith("not accepted: zero2: step varies from 1.00 to 5.50 between repeats")
    assert RegressionFolder(root).baselines.history() == []


def test_one_case_can_be_accepted_alone(root: Path, t5_pretrain: T5Pretrain) -> None:
    options = "--root", str(root), "--why", "more experts"
    assert t5_pretrain("regression", "accept", *options, "--night", NIGHT, "--case", "moe") == 0
    assert len(RegressionFolder(root).baselines.history()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--case", "smok"), "unknown case 'smok' (did you mean 'smoke'?); choose from smoke, moe, zero2"),
        (("run", "--case", "hosts"), "the case 'hosts' needs a hostfile"),
        (("run", "--hostfile", "no-such-file"), "no-such-file"),
        (("show", "--night", "20200101-000000"), "no night called '20200101-000000' has ended"),
        (("accept", "--why", " "), "--why is empty"),
        (("accept", "--why", "x", "--night", "20200101-000000"), "no night called '20200101-000000' has ended"),
        (("accept", "--why", "x", "--case", "zero9"), "has no case 'zero9': its cases are moe, smoke"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(
    root: Path, refused: Callable[..., str], arguments: tuple[str, ...], message: str
) -> None:
    command, *options = arguments
    assert message in refused(2, "regression", command, "--root", str(root), *options), "1 is for what got worse"
    regression = RegressionFolder(root)
    assert [folder.name for folder in regression.nights()] == [NIGHT]
    assert regression.baselines.history() == []

"""A failed flow ends in a state whose message begins with the cause, and leaves a report in the run's folder."""

import logging
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.client.schemas.objects import State, StateType

from t5train.errors import SpecError
from t5train.report.failure_report import note_stage
from tasks import run_page, shown_failures
from tasks.shown_failures import naming_run_folder, showing_failures


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The titles that the run's page gets. Artifacts are not created."""
    shown: list[str | None] = []
    monkeypatch.setattr(shown_failures, "show_in_title", shown.append)
    monkeypatch.setattr(shown_failures, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr(run_page, "create_markdown_artifact", lambda *_arguments: None)
    return shown


def failing(error: BaseException, folder: Path) -> Any:
    @showing_failures
    def flow() -> None:
        with naming_run_folder(folder):
            raise error

    return flow


def test_the_final_state_begins_with_the_cause_and_has_the_error(titles: list[str | None], tmp_path: Path) -> None:
    error = SpecError("optimizer.precision is fp16: use bf16")
    note_stage(error, "Train")
    state = cast(State[Any], failing(error, tmp_path)())
    assert state.type == StateType.FAILED
    assert state.message == "Train failed: optimizer.precision is fp16: use bf16"
    assert state.data is error
    assert titles == [state.message]
    assert (tmp_path / "report/failure.md").read_text().startswith("# Train failed\n\n**Why:** optimizer.precision is")


@pytest.mark.usefixtures("titles")
def test_only_unexpected_errors_are_logged_with_their_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (SpecError("wrong"), KeyError("defect")):
        failing(error, tmp_path)()
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]


@pytest.mark.usefixtures("titles")
def test_only_an_unexpected_error_names_the_file_with_its_traceback(tmp_path: Path) -> None:
    for error, expected in ((SpecError("wrong"), False), (KeyError("defect"), True)):
        failing(error, tmp_path)()
        named = f"this traceback is also in {tmp_path / 'report/failure.md'}" in error.__notes__
        assert named == expected
        assert ("in flow\n    raise error" in (tmp_path / "report/failure.md").read_text()) == expected


def test_a_cancellation_goes_on_and_only_restores_the_title(titles: list[str | None], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        failing(KeyboardInterrupt(), tmp_path)()
    assert titles == [None]
    assert not (tmp_path / "report").exists()


def test_success_restores_the_title(titles: list[str | None]) -> None:
    assert showing_failures(lambda: 5)() == 5
    assert titles == [None]

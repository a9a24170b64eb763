"""A failure report states first what failed and why, then what to do."""

from pathlib import Path

import pytest

from t5train.errors import InputError, SpecError, StorageError
from t5train.report.failure_report import Failure, failure_report, note_run_folder, note_stage


def failure_of(error: Exception, stage: str | None = None, folder: Path | None = None) -> Failure:
    if stage is not None:
        note_stage(error, stage)
    if folder is not None:
        note_run_folder(error, folder)
    return Failure.of(error)


def test_an_error_of_this_project_is_its_own_remedy(tmp_path: Path) -> None:
    failure = failure_of(SpecError("layout.zero_stage is 4: use 0 to 3"), "Train", tmp_path)
    report = failure_report(failure)
    assert report.startswith("# Train failed\n\n**Why:** layout.zero_stage is 4: use 0 to 3\n\n**What to do:**")
    assert f"`{tmp_path / 'attempts'}`" in report
    assert "Traceback" not in report


def test_a_failure_before_the_first_stage_says_so_and_its_cause_is_shown_as_it_is() -> None:
    failure = failure_of(SpecError("'/data/*/wiki*.jsonl' has no <extra_id_0>"))
    assert (failure.what, failure.cause) == ("The run could not start", "'/data/*/wiki*.jsonl' has no <extra_id_0>")
    report = failure_report(failure)
    assert "**Why:** '/data/\\*/wiki\\*.jsonl' has no \\<extra_id_0>\n" in report
    assert "attempts" not in report


@pytest.mark.parametrize("kind", [InputError, OSError])
def test_a_file_name_that_is_not_utf8_does_not_hide_the_cause(kind: type[Exception]) -> None:
    failure = failure_of(kind("it has only files of other formats: caf\udce9.pdf"))
    assert failure.cause.endswith("formats: caf\\udce9.pdf")
    assert failure.cause.encode()
    assert failure_report(failure).encode()


def test_an_unexpected_error_gets_its_type_and_its_traceback() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        report = failure_report(failure_of(error, "Export to Hugging Face"))
    assert report.startswith("# Export to Hugging Face failed\n\n**Why:** KeyError: 'missing'")
    assert '{}["missing"]' in report
    assert "Traceback (most recent call last)" in report


def test_notes_on_the_error_that_another_was_raised_from_count() -> None:
    cause, error = OSError("disk"), StorageError("/data: disk full")
    note_stage(cause, "Publish")
    error.__cause__ = cause
    assert Failure.of(error).stage == "Publish"
    error.__cause__ = error
    assert Failure.of(error) == Failure(error, None, None), "an error may be its own cause"

"""Reports are files in the folder of the run. The one on a failure goes when the run has succeeded."""

from pathlib import Path

from t5train.report.report_folder import FAILURE, SUMMARY, TRAINING, remove_failure, report_path, write_report


def test_a_report_replaces_the_one_before_and_leaves_no_other_file(tmp_path: Path) -> None:
    write_report(tmp_path, TRAINING, b"first")
    path = write_report(tmp_path, TRAINING, b"second")
    assert path == tmp_path / "report/training.png"
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_only_the_report_on_a_failure_is_removed_after_a_success(tmp_path: Path) -> None:
    remove_failure(tmp_path)
    for name in (FAILURE, SUMMARY):
        write_report(tmp_path, name, "text")
    remove_failure(tmp_path)
    assert list((tmp_path / "report").iterdir()) == [report_path(tmp_path, SUMMARY)]

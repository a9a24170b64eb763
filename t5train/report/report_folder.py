"""The folder ``report`` of a run, with one file for each report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from t5train.files.atomic import replacing, write_text
from t5train.files.run_folder import REPORT
from t5train.release.markdown import escaped, page, table

STAGES = "stages.md"
STAGING = "staging.md"
DATA = "data.md"
TRAINING = "training.png"
EVALUATION = "evaluation.md"
PROOF = "proof.md"
PUBLICATION = "publication.md"
SUMMARY = "summary.md"
FAILURE = "failure.md"


def report_path(run_folder: Path, name: str) -> Path:
    """Return the path of a report."""
    return run_folder / REPORT / name


def write_report(run_folder: Path, name: str, content: str | bytes) -> Path:
    """Write a report, replacing an earlier one of this name at once; returns its path.

    Raises StorageError if the disk is full or read-only.
    """
    path = report_path(run_folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        write_text(path, content)
    else:
        with replacing(path) as file:
            file.write(content)
    return path


def write_table(run_folder: Path, name: str, title: str, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write a report that is a table of at least one row. All rows have the same columns."""
    cells = ([escaped(cell) for cell in row.values()] for row in rows)
    return write_report(run_folder, name, page(f"# {title}", table(list(rows[0]), cells)))


def remove_failure(run_folder: Path) -> None:
    """Remove the report on the last failure, because the run has succeeded since."""
    report_path(run_folder, FAILURE).unlink(missing_ok=True)

"""Results are written as JSON, and docs/evidence/measurements.md shows them as they are."""

from pathlib import Path

import pytest

from benchmarks.measured_result import Result, spread
from benchmarks.results_page import PAGE, with_tables

RESULT = Result(
    what="Speed",
    command="python -m benchmarks.speed",
    commit="abc",
    machine="a machine",
    rows=[{"program": "ours", "MB/s": spread([1250.4, 1000.0, 1500.0], 0)}, {"program": "peer", "ratio": 2.5}],
)


def test_the_page_shows_the_results_of_today() -> None:
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "run `make results-page`"


def test_a_result_is_written_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RESULT.show(tmp_path / "result.json")
    assert Result.model_validate_json((tmp_path / "result.json").read_text("utf-8")) == RESULT
    assert "| ours | 1,250 (1,000 to 1,500) |  |\n| peer |  | 2.5 |" in capsys.readouterr().out


def test_a_table_has_the_columns_that_are_asked_for() -> None:
    assert RESULT.table(["ratio", "MB/s"], ranges=False).splitlines()[0:3:2] == ["| ratio | MB/s |", "|  | 1,250 |"]

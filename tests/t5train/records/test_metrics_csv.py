"""The metrics as a table."""

import csv
from pathlib import Path
from typing import Any

import pytest

from t5train.records.metrics import COLUMNS, Metrics


def rows(path: Path) -> list[dict[str, Any]]:
    with open(path, newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_a_row_is_there_as_soon_as_its_line_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 0, path) as metrics:
        metrics.write(1, {"loss": 2.5, "mfu": None, "skipped_steps": 0})
        metrics.write(1, {"encoder.1/expert_0": 17})
        assert rows(path) == [{"step": "1", "loss": "2.5", "skipped_steps": "0"}]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


@pytest.mark.parametrize("is_there_before", [True, False])
def test_a_table_has_the_rows_up_to_the_resumed_step_also_if_it_is_switched_on_later(
    tmp_path: Path, is_there_before: bool
) -> None:
    path = tmp_path / "metrics.csv"
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 0, path if is_there_before else None) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(step)})
    assert path.exists() is is_there_before
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 3, path) as metrics:
        metrics.write(4, {"loss": 40.0})
    assert [row["loss"] for row in rows(path)] == ["1.0", "2.0", "3.0", "40.0"]


def test_every_metric_that_is_asked_for_has_a_column_and_the_first_ones_never_move() -> None:
    assert COLUMNS[:11] == (
        *("step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "tokens_seen"),
        *("memory_bytes", "host_memory_bytes", "data_wait_seconds", "skipped_steps"),
    )
    assert len(set(COLUMNS)) == len(COLUMNS)

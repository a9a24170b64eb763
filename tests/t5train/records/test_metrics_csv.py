"""The metrics as a table."""

import csv
from pathlib import Path
from typing import Any

from t5train.records.metrics import Metrics
from t5train.records.metrics_csv import COLUMNS


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


def test_rows_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 0, path) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(step)})
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 3, path) as metrics:
        metrics.write(4, {"loss": 40.0})
    assert [row["loss"] for row in rows(path)] == ["1.0", "2.0", "3.0", "40.0"]


def test_a_table_that_is_switched_on_later_has_the_earlier_rows(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 0) as metrics:
        metrics.write(1, {"loss": 1.0})
    assert not (tmp_path / "metrics.csv").exists()
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 1, tmp_path / "metrics.csv") as metrics:
        metrics.write(2, {"loss": 2.0})
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["1", "2"]


def test_every_metric_that_is_asked_for_has_a_column_and_the_first_ones_never_move() -> None:
    assert COLUMNS[:11] == (
        *("step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "tokens_seen"),
        *("memory_bytes", "host_memory_bytes", "data_wait_seconds", "skipped_steps"),
    )
    assert len(set(COLUMNS)) == len(COLUMNS)

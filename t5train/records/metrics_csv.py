"""The file ``metrics.csv``: the metrics of a run as a table whose columns are the same for every run."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t5train.files.atomic import write_text

COLUMNS = (
    *("step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "tokens_seen"),
    *("memory_bytes", "host_memory_bytes", "data_wait_seconds", "skipped_steps"),
    *("seconds", "cpu_seconds", "process_cpu_seconds", "save_seconds"),
    *("router_loss", "dropped_tokens"),
    *("validation_loss", "validation_content_loss", "unigram_content_loss", "shuffled_content_loss"),
    *("test_loss", "test_content_loss"),
    "validate_seconds",
)
"""The columns, in order. Later versions add new ones at the end only. Tokens of single experts have no column."""


class MetricsCsv:
    """Appends rows to ``metrics.csv``; a value that a line does not have is an empty field."""

    def __init__(self, path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the file with one row for each of ``lines``, the current content of ``metrics.jsonl``.

        After a resume, this removes the rows of steps that will be trained again. It also fills in earlier steps if the
        file is enabled partway through a run.
        """
        table = io.StringIO(newline="")
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for line in lines if (row := _row(line)))
        write_text(path, table.getvalue())
        self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 - stays open until close() is called
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one row and flush it to the kernel; a line with no value in any column is left out."""
        if row := _row(line):
            self._writer.writerow(row)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(line: Mapping[str, Any]) -> list[Any]:
    row = [line.get(name) for name in COLUMNS]
    return row if any(value is not None for value in row[1:]) else []

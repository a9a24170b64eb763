"""The table of what each stage of a run made or reused."""

import logging
import time
from pathlib import Path
from typing import Any, TypeVar

from t5train.records.stage_records import Record
from t5train.report.report_folder import STAGES, write_table
from tasks.artifacts import not_disturbing, shown_table
from tasks.stages import Stage, numbered

_log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
_TITLE = "Result of each stage"


class StageTable:
    """Collects the records of a flow run by the title of their stage, in the order of the stages, and shows them."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self.records: dict[str, Record] = {}
        self._rows: list[dict[str, Any]] = []
        self._added_at = time.monotonic()
        self._artifact = shown_table("stages")

    def add(self, stage: Stage, record: R) -> R:
        """Add a stage's result and the time since the previous result; return the record."""
        now = time.monotonic()
        self.records[stage.title] = record
        self._rows.append(line := row(stage, record, now - self._added_at))
        _log.info("%s: %s %s", numbered(stage), line["result"], record.location)
        self._added_at = now
        with not_disturbing("the stages in the run's folder"):
            write_table(self._run_folder, STAGES, _TITLE, self._rows)
        self._artifact.show(self._rows, _TITLE)
        return record


def row(stage: Stage, record: Record, seconds: float) -> dict[str, Any]:
    """Return one row of the table. The widest cells are last, because the UI shows only about half of the columns."""
    return {
        "stage": stage.title,
        "result": "reused" if record.reused else "made",
        "seconds": round(seconds, 1),
        "files": len(record.files),
        "bytes": f"{sum(digest.size for digest in record.files.values()):,}",
        "fingerprint": record.fingerprint[:12],
        "folder": record.location,
        "counts": ", ".join(f"{name} {value:,}" for name, value in record.counts.items()),
    }

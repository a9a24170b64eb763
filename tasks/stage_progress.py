"""Prefect artifacts for the progress of stages and a table of their results. Progress is logged, too."""

import json
import logging
import re
import time
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from t5train.progress import Progress, silent
from t5train.records.stage_records import Record

SECONDS_UNTIL_SHOWN = 2.0
SECONDS_BETWEEN_UPDATES = 1.0
SECONDS_BETWEEN_LINES = 10.0
_log = logging.getLogger(__name__)


class StageProgress:
    """A progress callback that updates one artifact, at most once per second, and logs every ten seconds.

    It also passes every call on to ``watcher``.

    A stage that ends within two seconds creates no artifact and logs nothing. If the server does not respond, the
    artifact is not updated and the stage continues, so training survives a restart of the server.
    """

    def __init__(self, stage: str, watcher: Progress = silent) -> None:
        self._stage, self._watcher = stage, watcher
        started = time.monotonic()
        self._updated_at = started + SECONDS_UNTIL_SHOWN - SECONDS_BETWEEN_UPDATES
        self._logged_at = started
        self._artifact: UUID | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Report ``done`` of ``total`` units of ``what``. An existing artifact is always updated at the end."""
        self._watcher(f"{self._stage}: {what}", done, total)
        now = time.monotonic()
        ends = self._artifact is not None and done == total
        if ends or now - self._updated_at >= SECONDS_BETWEEN_UPDATES:
            self._updated_at = now
            self._try_to_show(100 * done / total if total else 0.0, _sentence(what, done, total))
        if now - self._logged_at >= SECONDS_BETWEEN_LINES:
            self._logged_at = now
            _log.info("%s: %s", self._stage, _sentence(what, done, total))

    def _try_to_show(self, percent: float, description: str) -> None:
        try:
            self._show(percent, description)
        except Exception as error:  # Prefect's client raises errors of many types if the server is gone
            _log.warning("could not show the progress of %s: %s: %s", self._stage, type(error).__name__, error)

    def _show(self, percent: float, description: str) -> None:
        if self._artifact is None:
            self._artifact = cast(UUID, create_progress_artifact(percent, _key(self._stage), description))
        else:
            update_progress_artifact(self._artifact, percent, description)


def _sentence(what: str, done: int, total: int | None) -> str:
    return f"{done:,} of {total:,} {what}" if total else f"{done:,} {what}"


def _key(stage: str) -> str:
    return "progress-" + re.sub("[^a-z0-9]+", "-", stage.lower())


R = TypeVar("R", bound=Record)


class StageTable:
    """Collects the records of a flow run, in the order of its stages."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._added_at = time.monotonic()
        self._artifact: UUID | None = None

    def add(self, stage: str, record: R) -> R:
        """Add a stage's result and the time since the previous result; return the record."""
        now = time.monotonic()
        self._rows.append(line := row(stage, record, now - self._added_at))
        _log.info("%s: %s %s", stage, line["result"], record.path)
        self._added_at = now
        self._show()
        return record

    def _show(self) -> None:
        if self._artifact is None:
            self._artifact = cast(UUID, create_table_artifact(self._rows, "stages", "Result of each stage"))
            return
        with get_client(sync_client=True) as client:
            client.update_artifact(self._artifact, ArtifactUpdate(data=json.dumps(self._rows)))


def row(stage: str, record: Record, seconds: float) -> dict[str, Any]:
    """Return one row of the table. The widest cells are last, because the UI shows only about half of the columns."""
    return {
        "stage": stage,
        "result": "reused" if record.reused else "made",
        "seconds": round(seconds, 1),
        "files": len(record.files),
        "bytes": f"{sum(digest.size for digest in record.files.values()):,}",
        "fingerprint": record.fingerprint[:12],
        "folder": str(record.path),
        "counts": ", ".join(f"{name} {value:,}" for name, value in record.counts.items()),
    }

"""A table of what each stage of a run made, as a Prefect artifact that grows with the run."""

import json
import logging
import time
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from t5train.records import Record

_log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)


class StageTable:
    """Collects the records of a flow run, in the order of its stages."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._added_at = time.monotonic()
        self._artifact: UUID | None = None

    def add(self, stage: str, record: R) -> R:
        """Note what a stage made in the time since the stage before it; gives the record back."""
        now = time.monotonic()
        self._rows.append(line := row(stage, record, now - self._added_at))
        _log.info("%s: %s %s", stage, line["result"], record.path)
        self._added_at = now
        self._show()
        return record

    def _show(self) -> None:
        if self._artifact is None:
            self._artifact = cast(UUID, create_table_artifact(self._rows, "stages", "What each stage made"))
            return
        with get_client(sync_client=True) as client:
            client.update_artifact(self._artifact, ArtifactUpdate(data=json.dumps(self._rows)))


def row(stage: str, record: Record, seconds: float) -> dict[str, Any]:
    """One line of the table, the widest cells last: a page shows no more than half of them at once."""
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

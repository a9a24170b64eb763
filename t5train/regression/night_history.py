"""``history.jsonl``: one line for each night and case, which stays when the night's files are removed."""

import json
import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.records.identity import fingerprint
from t5train.regression.night_results import Compared, NightResult

_log = logging.getLogger(__name__)


class Line(BaseModel):
    """What a night gave for a case."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    night: str
    case: str
    machine: str
    """Fingerprint of the machine key."""
    passed: bool
    compared: dict[str, Compared]


def append(path: Path, result: NightResult) -> None:
    """Append a line for each case of a night, and wait until they are on disk."""
    failed = {finding.case for finding in result.findings}
    with open(path, "a", encoding="utf-8") as file:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            file.write("\n")  # ends a line that was cut off by a full disk or a kill
        for each in result.results:
            line = Line(
                night=result.night,
                case=each.case,
                machine=fingerprint(each.machine),
                passed=each.case not in failed,
                compared=result.compared[each.case],
            )
            file.write(json.dumps(line.model_dump(mode="json"), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """Return all lines, the oldest first. Damaged ones are logged and left out, as no night's verdict needs them."""
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_text("utf-8").split("\n")[:-1], start=1):
        try:
            found.append(Line.model_validate_json(text))
        except ValidationError as error:
            _log.warning("line %d of %s is damaged (%s): remove that line", number, path, error.errors()[0]["msg"])
    return found

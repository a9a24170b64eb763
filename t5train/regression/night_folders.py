"""The folder ``{root}/regression``: its lock, and one folder for each night.

::

    lock            held by the process that runs a night or accepts one
    nights/         20261123-021500/ and so on: all files of a night, results.json, report.md, plot.png
    baselines/      what was accepted (t5train.regression.baselines)
    history.jsonl   one line for each night and case, which stays when the night's files are removed
"""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.errors import RegressionError, RegressionRunning, RegressionUsage
from t5train.files.locks import try_lock
from t5train.files.presence import visible_in
from t5train.records.identity import fingerprint
from t5train.regression.baselines import Baselines
from t5train.regression.night_results import RESULTS, Compared, NightResult

_NAME = re.compile("[0-9]{8}-[0-9]{6}")
MAX_NIGHTS = 365
_log = logging.getLogger(__name__)


class HistoryLine(BaseModel):
    """What a night gave for a case."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    night: str
    case: str
    machine: str
    """Fingerprint of the machine key."""
    passed: bool
    compared: dict[str, Compared]


class RegressionFolder:
    """``{root}/regression``."""

    def __init__(self, root: Path) -> None:
        self.path = root / "regression"
        self.nights_path = self.path / "nights"
        self.history_path = self.path / "history.jsonl"
        self.baselines = Baselines(self.path / "baselines")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. Raises RegressionRunning if another process holds it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self.path / "lock"
        with open(lock, "a+", encoding="utf-8") as file:
            if not try_lock(file.fileno()):
                file.seek(0)
                raise RegressionRunning(
                    f"another regression is running: {lock} is locked by process {file.read().strip() or 'unknown'}. "
                    "Wait for it to end, or end it, then start again"
                )
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def begin_night(self) -> Path:
        """Create and return the folder of a new night, named after the time in UTC."""
        folder = self.nights_path / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise RegressionError(f"{folder} exists: a night began in this second. Start again") from None
        return folder

    def nights(self) -> list[Path]:
        """Return the folders of all nights, the oldest first. Other files and folders there are not touched."""
        return [path for path in visible_in(self.nights_path) if _NAME.fullmatch(path.name) and path.is_dir()]

    def surplus_nights(self, keep: int) -> list[Path]:
        """Return all nights but the newest ``keep``."""
        return self.nights()[:-keep]

    def night(self, name: str | None) -> Path:
        """Return the folder of a night, or of the newest that has ended.

        Raises RegressionUsage for a name that no night has, and RegressionError if no night has ended.
        """
        ended = [folder for folder in self.nights() if (folder / RESULTS).exists()]
        if name is None and ended:
            return ended[-1]
        for folder in ended:
            if folder.name == name:
                return folder
        if not ended:
            raise RegressionError(f"no night has ended in {self.nights_path}: run one first, or correct --root")
        newest = ", ".join(folder.name for folder in ended[-3:])
        raise RegressionUsage(f"no night called {name!r} has ended in {self.nights_path}: the newest are {newest}")

    def append_history(self, result: NightResult) -> None:
        """Append a line for each case of a night, and wait until they are on disk."""
        failed, path = {finding.case for finding in result.findings}, self.history_path
        with open(path, "a", encoding="utf-8") as file:
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                file.write("\n")  # ends a line that was cut off by a full disk or a kill
            for each in result.results:
                line = HistoryLine(
                    night=result.night,
                    case=each.case,
                    machine=fingerprint(each.machine),
                    passed=each.case not in failed,
                    compared=result.compared[each.case],
                )
                file.write(json.dumps(line.model_dump(mode="json"), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def history(self) -> list[HistoryLine]:
        """Return all lines, the oldest first. Damaged ones are logged and left out: no night's verdict needs them."""
        lines = self.history_path.read_text("utf-8").split("\n")[:-1] if self.history_path.exists() else []
        found = []
        for number, text in enumerate(lines, start=1):
            try:
                found.append(HistoryLine.model_validate_json(text))
            except ValidationError as error:
                said = error.errors()[0]["msg"]
                _log.warning("line %d of %s is damaged (%s): remove that line", number, self.history_path, said)
        return found

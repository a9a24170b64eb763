"""Accepted results that later nights are compared with. The history is append-only: one file for each case and time."""

import getpass
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.errors import RegressionError, RegressionUsage
from t5train.files.atomic import write_json
from t5train.files.presence import visible_in
from t5train.records.identity import fingerprint
from t5train.regression.machine_key import changed_versions, same_hardware
from t5train.regression.night_results import CaseResult

FIRST = "the first night of this case on this machine"


class Baseline(BaseModel):
    """A result of a case that was accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    night: str
    accepted_at: str
    user: str
    why: str
    result: CaseResult


class Baselines:
    """The folder of accepted baselines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def history(self) -> list[Baseline]:
        """Return all baselines, the oldest first. Raises RegressionError for a damaged file."""
        found = [_read(path) for path in visible_in(self.folder) if path.suffix == ".json"]
        return sorted(found, key=lambda baseline: baseline.accepted_at)

    def newest(self, case: str, machine: Mapping[str, str]) -> Baseline | None:
        """Return the newest baseline of a case on the same hardware; None if there is none.

        One with the same versions is preferred, even to a newer one: after a downgrade, losses can be bit-equal again.
        """
        every = [one for one in self.history() if one.result.case == case]
        fitting = [one for one in every if same_hardware(one.result.machine, machine)]
        same = [one for one in fitting if not changed_versions(one.result.machine, machine)]
        return next(reversed(same or fitting), None)

    def accept(self, night: str, result: CaseResult, why: str) -> Baseline:
        """Record a result as the new baseline of its case, hardware and versions."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = datetime.now(UTC)
        baseline = Baseline(
            night=night, accepted_at=now.isoformat(timespec="microseconds"), user=_user(), why=why, result=result
        )
        name = f"{now:%Y%m%dT%H%M%S%f}-{result.case}-{fingerprint(result.machine)[:8]}.json"
        write_json(self.folder / name, baseline.model_dump(mode="json"))
        return baseline


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        return str(os.getuid())


def _read(path: Path) -> Baseline:
    try:
        return Baseline.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RegressionError(
            f"{path} is damaged or of another version ({error.errors()[0]['msg']}). Move the file away; then an older "
            "baseline is used"
        ) from error


def require_reason(why: str) -> None:
    """Raise RegressionUsage for an empty reason."""
    if not why.strip():
        raise RegressionUsage("--why is empty: say why the results are the new baseline, such as --why 'torch 2.13'")

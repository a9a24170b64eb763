"""Accepted results that later nights are compared with, and the machine for which each counts.

Accepted baselines are never changed: each is a file of its own, for a case and a time.
"""

import getpass
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.errors import RegressionError, RegressionUsage
from t5train.files.atomic import write_json
from t5train.files.presence import visible_in
from t5train.host_resources import num_cores
from t5train.records.identity import fingerprint
from t5train.regression.night_results import CaseResult

FIRST = "the first night of this case on this machine"
_PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
_HARDWARE = ("processor", "cores", "ranks", "device", "hosts")
"""The parts of a key that are no versions: on other hardware, times and memory say nothing about a change."""


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


def machine_key(num_ranks: int, device: str, hosts: str) -> dict[str, str]:
    """Return the machine of a result: hardware, and versions.

    A baseline counts for the same hardware only, but for other versions as well: an upgrade is what a night must judge.
    """
    key = {
        "processor": _processor(),
        "cores": str(num_cores()),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "ranks": str(num_ranks),
        "device": device,
    }
    return key | ({"hosts": hosts} if hosts else {})


def same_hardware(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two keys are of the same hardware, whatever the versions."""
    return all(one.get(name) == other.get(name) for name in _HARDWARE)


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the versions that changed, such as ``torch 2.12.0 -> 2.13.0``."""
    versions = (name for name in {**before, **now} if name not in _HARDWARE)
    return [
        f"{name} {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}"
        for name in versions
        if before.get(name) != now.get(name)
    ]


def _processor() -> str:
    """Return the processor's name, as Linux knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

"""Every fault of every operation, tried in turn and recorded in a journal, so that a campaign can be continued."""

import errno
import hashlib
import json
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.io_faults.interposer import Call, Mode
from tests.acceptance.io_faults.workers import Workers

ERRORS = ("EIO", "ESTALE", "EACCES", "EMFILE", "ENOSPC")
MODES: tuple[Mode, ...] = ("once", "permanently")
_ATTEMPTS = 3
"""How often a fault is tried while it is not reached: threads may make other calls the next time."""
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, order=True)
class Trial:
    """One fault of one operation."""

    operation: str
    call: Call
    error: str
    mode: Mode

    def to_json(self) -> list[Any]:
        """A form that ``of_json`` reads back."""
        return [self.operation, [self.call.kind, self.call.path, self.call.ordinal], self.error, self.mode]

    @classmethod
    def of_json(cls, values: Sequence[Any]) -> "Trial":
        """Read what ``to_json`` made."""
        operation, call, error, mode = values
        return cls(operation, Call(*call), error, mode)


Outcome = dict[str, Any]


class DifferentCode(Exception):
    """The journal was written by another version of the code."""


class Journal:
    """Outcomes in a file, one line each. A file that exists is continued."""

    def __init__(self, path: Path) -> None:
        """Raises DifferentCode if another version of the code wrote the journal."""
        self.outcomes: dict[Trial, Outcome] = {}
        self._writing = threading.Lock()
        code = code_digest()
        if path.exists():
            first, *lines = path.read_text("utf-8").splitlines() or [""]
            if not first or json.loads(first)["code"] != code:
                raise DifferentCode(
                    f"{path} was written by different code: remove it, or choose another file with --journal"
                )
            for line in lines:
                self._read_line(line)
        self._path = path
        if not path.exists():
            self._write({"code": code})

    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Record an outcome. Thread-safe."""
        with self._writing:
            self.outcomes[trial] = outcome
            self._write({"trial": trial.to_json(), **outcome})

    def _read_line(self, line: str) -> None:
        try:
            values = json.loads(line)
        except ValueError:  # a torn last line: the disk was full, or the machine went down
            return
        self.outcomes[Trial.of_json(values.pop("trial"))] = values

    def _write(self, values: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def plan_trials(workers: Workers, operations: Iterable[str]) -> dict[str, list[Trial]]:
    """Every trial of each operation, from the calls that it makes when none fails."""
    found = {}
    for name in operations:
        calls = [Call(*each) for each in workers.ask("calls", name)]
        found[name] = [Trial(name, call, error, mode) for call in calls for error in ERRORS for mode in MODES]
    return found


def shuffled(plan: dict[str, list[Trial]], seed: int, per_operation: int | None = None) -> list[Trial]:
    """All trials, or ``per_operation`` of each operation, in an order from the seed.

    Any part of it is a fair sample.
    """
    chosen: list[Trial] = []
    for name, trials in plan.items():
        order = random.Random(f"{seed} {name}")
        chosen += order.sample(trials, min(per_operation or len(trials), len(trials)))
    random.Random(seed).shuffle(chosen)
    return chosen


def run(workers: Workers, trials: Sequence[Trial], journal: Journal) -> Iterator[tuple[Trial, Outcome]]:
    """Run the trials that the journal lacks, and yield each outcome."""
    remaining = [trial for trial in trials if trial not in journal.outcomes]
    for trial, outcome in workers.map(lambda worker, trial: (trial, _outcome(worker, trial)), remaining):
        journal.record(trial, outcome)
        yield trial, outcome


def _outcome(worker: Any, trial: Trial) -> Outcome:
    operation, call, error, mode = trial.to_json()
    outcome: Outcome = {}
    for _ in range(_ATTEMPTS):
        outcome = worker.ask("outcome", operation, call, getattr(errno, error), mode)
        if outcome["fired"]:
            break
    return outcome


def code_digest() -> str:
    """The digest of all code that the outcomes depend on: this project's, and this package's."""
    digest = hashlib.sha256()
    for package in ("t5train", "infra", "flows", "tests/acceptance/io_faults"):
        for path in sorted((_ROOT / package).rglob("*.[cp]*")):
            if path.suffix in {".py", ".c"}:
                digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()

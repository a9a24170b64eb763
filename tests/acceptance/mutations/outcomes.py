"""The record of what tests found: one JSON line for each mutation, and for tests that pass without one."""

import hashlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.acceptance.mutations.mutated_copy import REPOSITORY, tracked_files
from tests.acceptance.mutations.mutation import Mutation
from tests.acceptance.result_table import ResultLines

_CODE = ("t5train/", "infra/", "tasks/", "flows/", "deployments/", "tests/", "pyproject.toml")
_MUTATIONS = "tests/acceptance/mutations/"


@dataclass(frozen=True)
class Outcome:
    """What the tests of a mutation found. ``failed`` is the first test that failed, or empty if it survived."""

    date: str
    commit: str
    code: str
    mutation: str
    digest: str
    failed: str
    seconds: float


class Record:
    """A file of outcomes, which only counts for the code that it was made with: any change is tested again."""

    def __init__(self, path: Path) -> None:
        self._lines = ResultLines(path)
        self._code, self._commit = _digest_of_code(), _commit()
        entries = [entry for entry in self._lines.rows() if entry["code"] == self._code]
        self.passed = {test for entry in entries for test in entry.get("passed", ())}
        """Tests that pass without a mutation."""
        self._outcomes = {entry["mutation"]: Outcome(**entry) for entry in entries if "mutation" in entry}

    def caught(self, mutation: Mutation) -> Outcome | None:
        """Return the outcome of a mutation that was caught, as it is now; None if its tests have to be run."""
        found = self._outcomes.get(mutation.name)
        return found if found and found.failed and found.digest == mutation.digest else None

    def add_passed(self, tests: Sequence[str]) -> None:
        self.passed.update(tests)
        self._lines.append({**self._stamp(), "passed": [*tests]})

    def add(self, mutation: Mutation, failed: str, seconds: float) -> Outcome:
        stamp = self._stamp()
        outcome = Outcome(**stamp, mutation=mutation.name, digest=mutation.digest, failed=failed, seconds=seconds)
        self._lines.append(asdict(outcome))
        return outcome

    def _stamp(self) -> dict[str, str]:
        return {"date": time.strftime("%Y-%m-%d"), "commit": self._commit, "code": self._code}


def _digest_of_code() -> str:
    """Identify the product and its tests; not the mutations themselves, which have digests of their own."""
    digest = hashlib.sha256()
    for name in tracked_files():
        is_code = name.startswith(_CODE) and not name.startswith(_MUTATIONS)
        if is_code and (path := REPOSITORY / name).is_file():
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()

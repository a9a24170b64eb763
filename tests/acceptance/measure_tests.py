"""Run all tests, and write what each file and test took to docs/evidence/test-durations.md.

    python -m tests.acceptance.measure_tests [--only STAGE ...]

The exit code is 1 if tests failed. Their durations are recorded nevertheless.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from t5train.files.atomic import write_text
from tests.support.hardware import hardware

PAGE = Path("docs/evidence/test-durations.md")
_ABOVE = "<!-- `make test-durations` writes what follows. -->\n"
_STAGES = {
    "test": ["-m", "not cluster and not ui"],
    "ui": ["tests/deployments/ui"],
    "cluster": ["tests/cluster"],
}
"""Options of pytest for each, as in the Makefile."""
_FILES, _TESTS = 60, 40
"""How many of the costliest files and tests the page lists."""


@dataclass(frozen=True)
class Cost:
    """What one test took, fixtures included: wall and CPU seconds."""

    name: str
    seconds: float
    cpu: float


def run(stage: str) -> tuple[list[Cost], float, bool]:
    """Run a stage's tests. Returns what each took, the seconds of all of them, and whether they passed."""
    with TemporaryDirectory() as folder:
        record = Path(folder, "tests.jsonl")
        switches = ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder", "-q"]
        command = [sys.executable, "-m", "pytest", *switches, *_STAGES[stage], f"--record-durations={record}"]
        began = time.monotonic()
        code = subprocess.run(command, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, check=False).returncode
        took = time.monotonic() - began
        lines = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    return [Cost(line["test"], line["seconds"], line["cpu"]) for line in lines], took, code == 0


def page(stages: Mapping[str, tuple[list[Cost], float]], commit: str) -> str:
    text = f"Measured on {time.strftime('%Y-%m-%d')} at commit {commit}, on {hardware()}.\n\n"
    text += "| stage | tests | minutes | CPU minutes |\n|---|---|---|---|\n"
    for stage, (tests, took) in stages.items():
        text += f"| {stage} | {len(tests)} | {took / 60:.1f} | {sum(test.cpu for test in tests) / 60:.1f} |\n"
    every = [test for tests, _ in stages.values() for test in tests]
    text += f"\n## The {_FILES} files that use most CPU time\n\n" + _table("file", _files(every), _FILES)
    return text + f"\n## The {_TESTS} tests that use most CPU time\n\n" + _table("test", every, _TESTS)


def _files(tests: Iterable[Cost]) -> list[Cost]:
    files: dict[str, Cost] = {}
    for test in tests:
        name = test.name.partition("::")[0]
        before = files.get(name, Cost(name, 0, 0))
        files[name] = Cost(name, before.seconds + test.seconds, before.cpu + test.cpu)
    return list(files.values())


def _table(what: str, tests: Sequence[Cost], shown: int) -> str:
    costliest = sorted(tests, key=lambda test: test.cpu, reverse=True)
    text = f"| {what} | seconds | CPU seconds |\n|---|---|---|\n"
    for test in costliest[:shown]:
        text += f"| `{test.name.removeprefix('tests/')}` | {test.seconds:.1f} | {test.cpu:.1f} |\n"
    if rest := costliest[shown:]:
        seconds, cpu = sum(test.seconds for test in rest), sum(test.cpu for test in rest)
        text += f"| {len(rest)} others | {seconds:.0f} | {cpu:.0f} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(_STAGES), default=list(_STAGES), metavar="STAGE")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    outcomes = {stage: run(stage) for stage in options.only}
    above, _, _ = PAGE.read_text("utf-8").partition(_ABOVE)
    measured = {stage: (tests, took) for stage, (tests, took, _) in outcomes.items()}
    write_text(PAGE, above + _ABOVE + "\n" + page(measured, commit.strip()))
    return 0 if all(passed for _, _, passed in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

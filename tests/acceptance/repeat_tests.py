"""Run all tests again and again, half of the time on busy cores and in random order: which fail by chance?

    python -m tests.acceptance.repeat_tests [--runs 10] [--ci-runs 3]

Every second run shares the cores with two endless loops, and has its tests in a new random order. Each run adds a row
to docs/evidence/test-runs.md. Runs that are there are not repeated, so an interrupted command continues. The output of
a run that fails is kept in work/test-runs. The exit code is 1 if a run failed.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.acceptance.result_table import ResultTable

TABLE = ResultTable(Path("docs/evidence/test-runs.md"), ("run", "load", "order", "commit", "date", "minutes", "result"))
PASSED = "passed"
_LOGS = Path("work/test-runs")
_LOOPS = 2


@contextmanager
def busy_cores() -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(_LOOPS):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


def run(name: str, command: Sequence[str], *, loaded: bool) -> list[str]:
    """Run a command of tests, and return the row for it."""
    seed = random.randrange(10**6) if loaded else None
    environment = os.environ | ({} if seed is None else {"PYTEST_ADDOPTS": f"--shuffle={seed}"})
    _LOGS.mkdir(parents=True, exist_ok=True)
    log = _LOGS / f"{name.replace(' ', '-').replace('/', '').strip('.')}.log"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    started = time.monotonic()
    with ExitStack() as stack:
        if loaded:
            stack.enter_context(busy_cores())
        output = stack.enter_context(log.open("wb"))
        code = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    minutes = f"{(time.monotonic() - started) / 60:.0f}"
    if code == 0:
        log.unlink()
    load, order = (f"{_LOOPS} loops", f"drawn with {seed}") if loaded else ("none", "of files")
    result = PASSED if code == 0 else f"see {log}"
    return [name, load, order, commit.strip(), time.strftime("%Y-%m-%d"), minutes, result]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of make test")
    parser.add_argument("--ci-runs", type=int, default=3, help="of .ci/run")
    options = parser.parse_args()
    for command, count in ((["make", "test"], options.runs), ([".ci/run"], options.ci_runs)):
        for number in range(1, count + 1):
            name = f"{' '.join(command)} {number}"
            if name not in TABLE.rows():
                TABLE.add(run(name, command, loaded=number % 2 == 0))
    return 0 if all(row[-1] == PASSED for row in TABLE.rows().values()) else 1


if __name__ == "__main__":
    sys.exit(main())

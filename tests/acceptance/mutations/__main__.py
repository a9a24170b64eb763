"""Plant faults in a copy of the code, one at a time, and check that the tests named for each notice it.

::

    python -m tests.acceptance.mutations                      all of them: continues where it was interrupted
    python -m tests.acceptance.mutations --only NAME ...      some of them
    python -m tests.acceptance.mutations --jobs 2             two at a time, each in a copy of its own

Run it before a test is removed, and after: whatever was removed, each mutation must still be caught. Tests first have
to pass without a mutation. Outcomes are kept in a file, and hold for the code that they were made with. The exit code
is 1 if a mutation survived, or tests fail without one.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.acceptance.mutations.all_mutations import MUTATIONS, TOPICS
from tests.acceptance.mutations.mutated_copy import REPOSITORY, MutatedCopy
from tests.acceptance.mutations.mutation import Mutation
from tests.acceptance.mutations.outcomes import Outcome, Record

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
_SECONDS = 900.0
"""The longest that the tests of one mutation may take: a mutation that makes them hang counts as not caught."""
_TESTS_FAILED = 1
"""The exit code of pytest if it ran the tests and one failed."""


def failed_tests(copy: MutatedCopy, tests: Iterable[str], *, at_first: bool) -> tuple[list[str], str]:
    """Run tests in the copy, up to the first that fails or all. Return those that failed, and pytest's output.

    No test has failed if pytest could not run them, for example because the code cannot be imported, or if they hang.
    """
    switches = ["-q", "-n0", "--tb=short", "-rfE", *(["--exitfirst"] if at_first else [])]
    command = [str(copy.python), "-m", "pytest", *switches, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy.folder,
            env=copy.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [], f"no result after {_SECONDS:.0f} s"
    output = done.stdout + done.stderr
    return (_FAILED.findall(output) if done.returncode == _TESTS_FAILED else []), output


def require_passing(copy: MutatedCopy, mutations: Sequence[Mutation], record: Record) -> bool:
    """Run the tests that are not known to pass without a mutation. Print those that fail; return whether none does."""
    tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests if test not in record.passed)
    if not tests:
        return True
    began = time.monotonic()
    failed, output = failed_tests(copy, tests, at_first=False)
    seconds = time.monotonic() - began
    if failed or not re.search(r"^\d+ passed in ", output, re.MULTILINE):  # nor is one skipped
        print(f"without a mutation, these tests fail: {', '.join(failed)}\n{output[-6000:]}", flush=True)
        return False
    record.add_passed(set(tests), seconds)
    print(f"{len(tests)} tests pass without a mutation ({seconds:.0f} s)", flush=True)
    return True


def outcome_of(mutation: Mutation, copies: SimpleQueue[MutatedCopy], record: Record) -> Outcome:
    """Plant a mutation in a copy that is free, run its tests and record the outcome."""
    copy = copies.get()
    try:
        began = time.monotonic()
        with copy.planted(mutation):
            failed, output = failed_tests(copy, mutation.tests, at_first=True)
        seconds = round(time.monotonic() - began, 1)
    finally:
        copies.put(copy)
    if not failed:
        print(output[-2000:], flush=True)
    return record.add(mutation, failed[0] if failed else "", seconds)


def show(outcome: Outcome) -> None:
    """Print one line about a mutation."""
    what = f"caught by {outcome.failed}" if outcome.failed else "SURVIVED"
    print(f"{outcome.mutation}: {what} ({outcome.seconds:.1f} s)", flush=True)


def main() -> int:
    """Run the command."""
    options = _options()
    record = Record(options.record)
    chosen = [mutation for mutation in MUTATIONS if mutation.name in options.only]
    to_do = [mutation for mutation in chosen if not record.caught(mutation)]
    copies = SimpleQueue[MutatedCopy]()
    if to_do:
        for number in range(options.jobs):
            copies.put(MutatedCopy(options.copies.absolute() / f"copy-{number}"))
    outcomes = [found for mutation in chosen if (found := record.caught(mutation))]
    is_passing = True
    with ThreadPoolExecutor(options.jobs) as threads:
        for topic in TOPICS:
            of_topic = [mutation for mutation in topic if mutation in to_do]
            if not of_topic:
                continue
            copy = copies.get()
            is_passing &= (passes := require_passing(copy, of_topic, record))
            copies.put(copy)
            if passes:
                for outcome in threads.map(lambda each: outcome_of(each, copies, record), of_topic):
                    show(outcome)
                    outcomes.append(outcome)
    caught = [outcome for outcome in outcomes if outcome.failed]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(caught)} of {len(chosen)} mutations caught, in {seconds:.0f} s of tests", flush=True)
    for outcome in outcomes:
        if not outcome.failed:
            show(outcome)
    return 0 if is_passing and len(caught) == len(chosen) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutations at the same time")
    folder = REPOSITORY / "work/mutations"
    parser.add_argument("--copies", type=Path, default=folder, help="folder for the copies")
    parser.add_argument("--record", type=Path, default=folder / "outcomes.jsonl", help="file of outcomes")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: start the command again to continue\n")
        sys.exit(130)

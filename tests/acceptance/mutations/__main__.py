"""Plant faults in a copy of the code, one at a time, and check that the tests named for each notice it.

::

    python -m tests.acceptance.mutations                      all of them: continues where it was interrupted
    python -m tests.acceptance.mutations --only NAME ...      some of them
    python -m tests.acceptance.mutations --jobs 2             two at a time, each in a copy of its own

Run it before a test is removed, and after: whatever was removed, each mutation must still be caught. Tests first have
to pass without a mutation. Outcomes are kept in a file, and hold for the code that they were made with. All of them
together are the table in docs/evidence/claims.md. The exit code is 1 if a mutation survived, or tests fail without one.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.acceptance.mutations import claims_page
from tests.acceptance.mutations.mutated_copy import REPOSITORY, MutatedCopy
from tests.acceptance.mutations.mutation import MUTATIONS, Mutation
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
    code, output = copy.pytest.run([*switches, *tests], _SECONDS)
    return (_FAILED.findall(output) if code == _TESTS_FAILED else []), output


def show(outcome: Outcome) -> None:
    what = f"caught by {outcome.failed}" if outcome.failed else "SURVIVED"
    print(f"{outcome.mutation}: {what} ({outcome.seconds:.1f} s)", flush=True)


def outcome_of(mutation: Mutation, free: SimpleQueue[MutatedCopy], record: Record) -> Outcome | None:
    """Run a mutation's tests in a copy that is free, first without it, then with it, and record the outcome.

    None, and nothing is recorded, if a test does not pass without the mutation, or is skipped.
    """
    copy = free.get()
    try:
        if new := [test for test in mutation.tests if test not in record.passed]:
            failed, output = failed_tests(copy, new, at_first=False)
            if failed or not re.search(r"^\d+ passed in ", output, re.MULTILINE):
                print(f"without {mutation.name}, its tests do not pass:\n{output[-4000:]}", flush=True)
                return None
            record.add_passed(new)
        began = time.monotonic()
        with copy.planted(mutation):
            failed, output = failed_tests(copy, mutation.tests, at_first=True)
        seconds = round(time.monotonic() - began, 1)
    finally:
        free.put(copy)
    if not failed:
        print(output[-2000:], flush=True)
    show(outcome := record.add(mutation, failed[0] if failed else "", seconds))
    return outcome


def main() -> int:
    options = _options()
    record = Record(options.record)
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    chosen = [by_name[name] for name in options.only]
    to_do = [mutation for mutation in chosen if not record.caught(mutation)]
    outcomes = [found for mutation in chosen if (found := record.caught(mutation))]
    free = SimpleQueue[MutatedCopy]()
    with ThreadPoolExecutor(options.jobs) as threads, ExitStack() as stack:
        for number in range(min(options.jobs, len(to_do))):
            free.put(stack.enter_context(MutatedCopy(options.copies.absolute() / f"copy-{number}")))
        found = threads.map(lambda each: outcome_of(each, free, record), to_do)
        outcomes += [outcome for outcome in found if outcome is not None]
    caught = [outcome for outcome in outcomes if outcome.failed]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(caught)} of {len(chosen)} mutations caught, in {seconds:.0f} s of tests", flush=True)
    for outcome in outcomes:
        if not outcome.failed:
            show(outcome)
    if len(chosen) == len(MUTATIONS):
        claims_page.write(chosen, outcomes)
    return 0 if len(caught) == len(chosen) else 1


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

"""Make each system call on a file fail in turn, in every operation from select and save to export and publish.

::

    python -m tests.acceptance.io_faults                          all of them: continues where it was interrupted
    python -m tests.acceptance.io_faults --sample 20 --seed 3     twenty of each operation
    python -m tests.acceptance.io_faults --operations select save --errors EIO

Each call fails with EIO, ESTALE, EACCES, EMFILE and ENOSPC: once, and permanently (all later calls on its path fail
too). After each trial, no complete checkpoint is lost, and only the newest complete one is chosen. An export or
publication is whole, or not marked as complete. An operation that failed raised an OSError or one of this project's
errors, and named the path. The command prints a table of outcomes. It exits with 1 if any of this does not hold.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.acceptance.io_faults import campaign, outcome_table
from tests.acceptance.io_faults.operations import NAMES
from tests.acceptance.io_faults.workers import start_workers

_REPORT_SECONDS = 60.0


def main() -> int:
    arguments = _arguments()
    try:
        journal = campaign.Journal(arguments.journal)
    except campaign.DifferentCode as error:
        sys.stderr.write(f"{error}\n")
        return 1
    began = reported = time.monotonic()
    with start_workers(arguments.workers, arguments.operations) as workers:
        plan = campaign.plan_trials(workers, arguments.operations)
        plan = {name: [t for t in trials if t.error in arguments.errors] for name, trials in plan.items()}
        trials = campaign.shuffled(plan, arguments.seed, arguments.sample)
        sys.stderr.write("".join(f"{name}: {len(each)} trials\n" for name, each in plan.items()))
        for done, _ in enumerate(campaign.run(workers, trials, journal), 1):
            if (now := time.monotonic()) - reported > _REPORT_SECONDS:
                reported = now
                sys.stderr.write(f"{done} trials in {now - began:.0f} s; {len(trials)} in total\n")
    outcomes = {trial: journal.outcomes[trial] for trial in sorted(trials)}
    print(outcome_table.table(outcomes))
    for fault in outcome_table.faults(outcomes):
        print(f"\n{fault}")
    print(f"\n{len(outcomes)} trials: {outcome_table.summary(outcomes.values())}")
    return int(any(outcome_table.column_of(each) in outcome_table.FAULTS for each in outcomes.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.io_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operations", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--errors", nargs="+", choices=campaign.ERRORS, default=list(campaign.ERRORS))
    parser.add_argument("--sample", type=int, metavar="N", help="run only N trials of each operation")
    parser.add_argument("--seed", type=int, default=0, help="decides the order and the sample")
    parser.add_argument("--workers", type=int, default=2, help="number of trials at the same time")
    parser.add_argument(
        "--journal",
        type=Path,
        default=Path("io-faults.jsonl"),
        help="file of outcomes; trials that it contains are not repeated",
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: start the command again to continue\n")
        sys.exit(130)

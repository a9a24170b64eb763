"""Kill what operates a run, at seeded moments of its training on two hosts, and write the table of the outcomes.

::

    python -m tests.acceptance.operation.operation_kills --root DIR --into docs/evidence/operation-faults.md     as root
    python -m tests.acceptance.operation.operation_kills --kills 20

A round is one run that meets every fault once, in a random order, and must end with the weights of a run without any.
The outcomes are in DIR/outcomes.jsonl. An interrupted command continues: only the round that it was in is repeated.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.acceptance.operation.operation_faults import FAULTS, Fault
from tests.acceptance.operation.operation_site import NODES, SLOW, ServerError, Shown, Site, shared_folder
from tests.acceptance.result_table import ResultLines, write_table
from tests.support.cluster_runs import weights

SEED = 24
RESUMES_SECONDS, ENDS_SECONDS = 300.0, 400.0
_LOOK_SECONDS = 0.3
_COLUMNS = (
    "fault",
    "times",
    "right state after, median",
    "longest",
    "allowed",
    "attempt ended",
    "processes left",
    "went on",
    "weights bit-equal",
)
_HEADER = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n"


@dataclass(frozen=True)
class Outcome:
    round: int
    fault: str
    step: int
    seconds: float
    """Until Prefect showed the right state and went on showing it."""
    ended_attempt: bool
    left: int
    """How many processes of the ended attempt were still running when the next one trained."""
    went_on: bool
    bit_equal: bool = False

    @property
    def is_survived(self) -> bool:
        return self.left == 0 and self.went_on and self.bit_equal

    @property
    def passed(self) -> bool:
        (allowed,) = [fault.window for fault in FAULTS if fault.name == self.fault]
        return self.seconds <= allowed and self.is_survived


def inject(site: Site, number: int, run: str, name: str, fault: Fault, seeded: random.Random) -> Outcome:
    """Strike a run that trains, and follow it until it trains again."""
    _await_training(site, run, name, site.step(name) + seeded.randint(5, 15))
    before, flow, there, step = site.shown(run), site.flow(run), site.of_run(run), site.step(name)
    attempts, resumed_at = site.attempts(name), None
    assert flow is not None
    began = time.monotonic()
    fault.strike(site, run, seeded)
    struck_at, wrong_at, went_on = site.step(name), time.monotonic(), False
    if fault.is_outage:
        began = wrong_at
    deadline = time.monotonic() + RESUMES_SECONDS
    while not went_on and time.monotonic() < deadline:
        site.tick()
        shown, alive = _shown(site, run), flow.is_alive()
        if not _is_right(shown, before, alive):
            wrong_at = time.monotonic()
        if resumed_at is None and site.attempts(name) > attempts:
            resumed_at = site.step(name)
        # Ranks of an ended attempt may train until their lease ends, so steps count from the start of the next attempt.
        trains = site.step(name) > struck_at + 2 if alive else resumed_at not in (None, site.step(name))
        went_on = trains and _trains(shown, before, alive)
        time.sleep(_LOOK_SECONDS)
    ended = not flow.is_alive()
    left = {process for process in there if process.is_alive()} if ended else set()
    return Outcome(number, fault.name, step, round(wrong_at - began, 1), ended, len(left), went_on)


def _shown(site: Site, run: str) -> Shown | None:
    try:
        return site.shown(run)
    except ServerError:
        return None


def _is_right(shown: Shown | None, before: Shown, alive: bool) -> bool:
    """Whether Prefect shows a run as running exactly if its process is alive."""
    if shown is None:
        return False
    is_same = shown.state_type == "RUNNING" and shown.attempt == before.attempt
    return is_same == alive


def _trains(shown: Shown | None, before: Shown, alive: bool) -> bool:
    return shown is not None and shown.state_type == "RUNNING" and (alive or shown.attempt > before.attempt)


def _await_training(site: Site, run: str, name: str, step: int) -> None:
    def trains() -> bool:
        shown = _shown(site, run)
        assert shown is None or shown.state_type in {"SCHEDULED", "PENDING", "RUNNING"}, shown
        return site.step(name) >= step

    site.await_that(trains, RESUMES_SECONDS)


def play_round(site: Site, number: int, faults: list[Fault], undisturbed: object) -> list[Outcome]:
    """Let a run meet faults in a random order; returns the outcomes."""
    seeded, name = random.Random(f"{SEED}-{number}"), f"round-{number}-{int(time.time())}"
    run, outcomes = site.start_run(name), []
    site.cluster.set_rate(NODES[0], SLOW)
    for fault in seeded.sample(faults, len(faults)):
        outcomes.append(inject(site, number, run, name, fault, seeded))
        print(outcomes[-1], flush=True)
    site.cluster.set_rate(NODES[0], None)
    bit_equal = _final_weights(site, run, name) == undisturbed
    return [replace(each, bit_equal=bit_equal) for each in outcomes]


def undisturbed_weights(site: Site) -> object:
    """Return the digests of the final weights of a run without faults, which is trained once per root."""
    name = "undisturbed"
    site.train(name)
    return weights(site.root / "runs" / name)


def _final_weights(site: Site, run: str, name: str) -> object:
    """Wait for the run to be published. Raises AssertionError if it is not, or leaves a process or its slot."""
    site.await_that(lambda: (shown := _shown(site, run)) is not None and shown.state_type == "COMPLETED", ENDS_SECONDS)
    site.await_that(lambda: not site.of_run(run) and not site.occupying(), seconds=60)
    return weights(site.root / "runs" / name)


def rows(outcomes: list[Outcome]) -> list[str]:
    made = []
    for fault in FAULTS:
        of_fault = [each for each in outcomes if each.fault == fault.name]
        if not of_fault:
            continue
        seconds = [each.seconds for each in of_fault]
        times = (statistics.median(seconds), max(seconds), fault.window)
        counts = (
            sum(each.ended_attempt for each in of_fault),
            sum(each.left for each in of_fault),
            sum(each.went_on for each in of_fault),
            sum(each.bit_equal for each in of_fault),
        )
        cells = [fault.name, len(of_fault), *(f"{each:.0f} s" for each in times), *counts]
        made.append(f"| {' | '.join(map(str, cells))} |")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--root", type=Path, help="keep the outcomes there, to continue later")
    parser.add_argument("--only", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--into", type=Path, help="replace the table in this document")
    chosen = parser.parse_args()
    faults = [fault for fault in FAULTS if chosen.only in {None, fault.name}]
    with shared_folder(chosen.root) as root:
        record = ResultLines(root / "outcomes.jsonl")
        outcomes = [Outcome(**each) for each in record.rows()]
        if len(outcomes) < chosen.kills:
            with Site.up(root) as site:
                undisturbed = undisturbed_weights(site)
                while len(outcomes) < chosen.kills:
                    number = 1 + max((each.round for each in outcomes), default=0)
                    played = play_round(site, number, faults, undisturbed)
                    record.append(*map(asdict, played))
                    outcomes += played
    print(_HEADER + "\n".join(rows(outcomes)))
    if chosen.into:
        write_table(chosen.into, _HEADER, rows(outcomes))
    return 0 if all(each.passed for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

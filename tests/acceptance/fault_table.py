"""Inject every fault into a run on a test cluster and write the table in docs/evidence/faults.md.

::

    python -m tests.acceptance.fault_table --into docs/evidence/faults.md  all faults, as root; ten minutes on two cores
    python -m tests.acceptance.fault_table --only "a rank is killed"
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME, HOSTFILE
from t5train.files.run_folder import FAILURES, WITNESS_FOLDER
from tests.acceptance import fault_cases, hang_cases
from tests.acceptance.fault_cases import LEASE_SECONDS, RANK, Fault, pids
from tests.acceptance.result_table import write_table
from tests.support.cluster_runs import ClusterRunner, Ended, Started, last_step, prepare, weights
from tests.support.hanging_disk import DEVICE

SETTINGS = {
    "optimizer.num_steps": 70,
    "storage.checkpoint_every_steps": 20,
    "storage.validate_every_steps": 70,
    "cluster.lease_seconds": LEASE_SECONDS,
    "cluster.grace_seconds": 5,
    "cluster.retries": 0,
}
FAULTS = [*fault_cases.FAULTS, *hang_cases.FAULTS]
ALLOWED_SECONDS, LONGEST_SECONDS = 20, 400
_MOST_WORDS = 35
_OPTIONS = ["--hostfile", HOSTFILE, "--num-nodes", "2"]
_HEADER = """\
| fault | ranks ended after | command ended after | message | exit code | processes left | bit-equal after restart |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Pace:
    """When faults strike, and how fast runs train."""

    strike_at: int = 25
    """The first step at which a fault strikes."""
    steps_between: int = 5
    """How many steps a run takes at least after it has resumed, before the next fault strikes."""
    rate: str | None = None
    """The rate of the first node's link before a fault strikes."""
    struck_rate: str = "8mbit"
    """Its rate afterwards: faster, training might finish before the fault is noticed."""


@dataclass(frozen=True)
class Outcome:
    """What the run did after a fault, as measured."""

    fault: Fault
    ranks_seconds: float
    """From the fault until no rank is running on any host."""
    seconds: float
    """From the fault (from the start, if the fault was there before) until the command ended."""
    exit_code: int
    message: str
    left: list[str]

    def row(self, equal: str) -> str:
        ranks = f"{self.ranks_seconds:.1f} s" if self.fault.ends_ranks else ""
        seconds = f"{self.seconds:.1f} s" if self.fault.exit_code else ""
        said, _, _ = self.message.removeprefix("error: ").partition(" The output of the ")
        words = said.replace(HOME, "~").replace("|", "\\|").split() if self.fault.message else []
        message = " ".join([*words[:_MOST_WORDS], *["..."] * (len(words) > _MOST_WORDS)])
        left = "; ".join(self.left) or "0"
        cells = (self.fault.name, ranks, seconds, message, str(self.exit_code), left, equal)
        return f"|{'|'.join(f' {cell} ' if cell else '' for cell in cells)}|"


def inject(runner: ClusterRunner, fault: Fault, run_name: str | None = None, pace: Pace = Pace()) -> Outcome:
    """Start a run, inject the fault, and record how the run ends and which processes are left.

    ``run_name`` may be a run that an earlier fault has ended, which then resumes. The default is the fault's own run.
    """
    run_name = run_name or fault.run
    folder = runner.root / fault.root / "runs" / run_name
    steps_before, failures_before = last_step(folder), len(_failures(folder))
    with fault.wrong(runner):
        others = runner.processes()
        runner.cluster.set_rate("node0", pace.rate)
        at = time.monotonic()
        run = _start(runner, fault, run_name)
        if fault.strike:
            if fault.moment:
                fault.moment(runner, run)
            else:
                run.await_step(max(pace.strike_at, steps_before + pace.steps_between), LONGEST_SECONDS)
            goes_on = not fault.ends_ranks and not fault.started_again
            runner.cluster.set_rate("node0", None if goes_on else pace.struck_rate)
            at = time.monotonic()
            fault.strike(runner, run)
        ended, ranks_gone_at = _follow(runner, fault, run, run_name)
        if fault.blames is not None:
            new = _failures(folder)[failures_before:]
            assert [each["hosts"] for each in new] == [list(fault.blames)], new
        left = runner.left(others, ALLOWED_SECONDS)
        runner.cluster.set_rate("node0", None)
    message = ended.message.replace(str(runner.root), "{root}")
    return Outcome(fault, ranks_gone_at - at, ended.at - at, ended.exit_code, message, left)


def _failures(run_folder: Path) -> list[Any]:
    """The failures that are recorded of a run."""
    record = run_folder / FAILURES
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.exists() else []


def final_weights(runner: ClusterRunner, fault: Fault, run_name: str | None = None) -> Any:
    """Return the digests of the run's final weights, after restarting the run if it did not finish.

    ``run_name`` is the run into which the fault was injected, by default the fault's own. Raises AssertionError if the
    restarted run fails.
    """
    run_name = run_name or fault.run
    folder = runner.root / fault.root / "runs" / run_name
    if not (folder / WITNESS_FOLDER).exists():
        ended = _start(runner, fault, run_name).wait(LONGEST_SECONDS)
        assert ended.exit_code == 0, ended.output[-4000:]
    return weights(folder)


def undisturbed_weights(runner: ClusterRunner) -> Any:
    """Return the digests of the final weights of a run without a fault. Raises AssertionError if the run fails."""
    run = runner.start("train", "undisturbed", _OPTIONS)
    ended = run.wait(LONGEST_SECONDS)
    assert ended.exit_code == 0, ended.output[-4000:]
    return weights(run.run_folder)


def _start(runner: ClusterRunner, fault: Fault, run_name: str) -> Started:
    options = [*_OPTIONS, *(part for each in fault.settings for part in ("--set", each))]
    if fault.command == "train":
        (shards,) = (runner.root / "shards").iterdir()
        options += ["--shards", str(shards)]
    return runner.start(fault.command, run_name, options, fault.environment, runner.root / fault.root)


def _follow(runner: ClusterRunner, fault: Fault, run: Started, run_name: str) -> tuple[Ended, float]:
    """Wait until the command and its last rank have ended. Return the command's end and the time of the last rank's."""
    if fault.started_again:
        run.wait(LONGEST_SECONDS)
        runner.cluster.set_rate("node0", None)
        run = _start(runner, fault, run_name)
    if fault.ends_ranks:
        await_no_ranks(runner)
    ranks_gone_at = time.monotonic()
    return run.wait(LONGEST_SECONDS), ranks_gone_at


def await_no_ranks(runner: ClusterRunner) -> None:
    """Wait until no rank is running on any host. Raises AssertionError if that takes too long."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while any(pids(runner, host, RANK) for host in runner.cluster.nodes):
        assert time.monotonic() < deadline, f"ranks are still running: {runner.processes()}"
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="FAULT")
    parser.add_argument("--into", type=Path, help="replace the table in this document")
    chosen = parser.parse_args()
    if not DEVICE.exists() and chosen.into:
        parser.error(f"--into would remove the rows of a root that hangs: {DEVICE} does not exist. Load fuse")
    if not DEVICE.exists():
        print(f"Faults of a root that hangs are left out: {DEVICE} does not exist.")
    with staged() as runner:
        undisturbed = undisturbed_weights(runner)
        outcomes = [_shown(inject(runner, fault)) for fault in FAULTS if not chosen.only or fault.name in chosen.only]
        ends = {outcome.fault.run: final_weights(runner, outcome.fault) for outcome in outcomes}
        rows = [outcome.row("yes" if ends[outcome.fault.run] == undisturbed else "NO") for outcome in outcomes]
    print(_HEADER + "\n".join(rows))
    if chosen.into:
        write_table(chosen.into, _HEADER, rows)


def _shown(outcome: Outcome) -> Outcome:
    """Print a row as soon as it is known: the whole table takes minutes."""
    print(outcome.row("not compared yet"), flush=True)
    return outcome


@contextmanager
def staged() -> Iterator[ClusterRunner]:
    """Boot a head and two nodes, and prepare the text, vocabulary and token shards."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with Cluster.temporary(f"faults-{os.getpid()}", nodes=2, share=root) as cluster:
            runner = ClusterRunner(cluster, root, SETTINGS)
            prepare(root)
            yield runner


if __name__ == "__main__":
    main()

"""A fault in a run over several hosts ends the run everywhere, is named, and loses only steps since the checkpoint.

Covers a quarter of the rows of docs/evidence/faults.md; `make faults` runs them all. To start fewer runs, all faults
are injected into the same run, one after the other. Those that preflight refuses come first, because they start no
attempt; the harmless one comes last, and the run ends.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from t5train.files.run_folder import FAILURES
from t5train.spec.rank_job import TrainJob
from tests.acceptance.fault_cases import LEASE_SECONDS, Fault
from tests.acceptance.fault_table import ALLOWED_SECONDS, FAULTS, SETTINGS, Outcome, Pace, inject
from tests.support import cluster_runs
from tests.support.cluster_runs import ClusterRunner

pytestmark = pytest.mark.cluster

RUN = "faults"
(HARMLESS,) = [fault for fault in FAULTS if fault.in_ci and fault.exit_code == 0]
# All faults of one run have its root.
HARMFUL = [replace(fault, root=HARMLESS.root) for fault in FAULTS if fault.in_ci and fault.exit_code]
CHOSEN = [*sorted(HARMFUL, key=lambda fault: fault.ends_ranks), HARMLESS]
ENDING_RANKS = [fault for fault in CHOSEN if fault.ends_ranks]
STEPS = cluster_runs.SETTINGS["optimizer.num_steps"]
SHORT = {
    "optimizer.num_steps": STEPS,
    "storage.checkpoint_every_steps": 5,
    "storage.validate_every_steps": STEPS,
}
"""A run as long as the one on one host, so that one run without faults serves all tests."""
# A step takes two seconds.
PACE = Pace(strike_at=7, steps_between=1, rate="4mbit", struck_rate="4mbit")


@pytest.fixture(scope="module")
def fault_runner(runner: ClusterRunner) -> ClusterRunner:
    """The runner with settings for faults: a short lease, a short grace period and no retries."""
    return ClusterRunner(runner.cluster, runner.root, {**runner.settings, **SETTINGS, **SHORT})


@pytest.fixture(scope="module")
def outcome_of(fault_runner: ClusterRunner) -> Callable[[Fault], Outcome]:
    """``outcome_of(fault)``: what the run did after the fault, which is injected only once."""
    outcomes: dict[str, Outcome] = {}

    def outcome_of(fault: Fault) -> Outcome:
        if fault is HARMLESS:
            for other in HARMFUL:
                outcome_of(other)
        if fault.name not in outcomes:
            # Without the record of earlier failures, so that no message names their hosts.
            (fault_runner.root / fault.root / "runs" / RUN / FAILURES).unlink(missing_ok=True)
            outcomes[fault.name] = inject(fault_runner, fault, RUN, PACE)
        return outcomes[fault.name]

    return outcome_of


@pytest.mark.parametrize("fault", CHOSEN, ids=[fault.name for fault in CHOSEN])
def test_a_fault_is_detected_and_named_and_leaves_nothing_running(
    fault: Fault, outcome_of: Callable[[Fault], Outcome]
) -> None:
    outcome = outcome_of(fault)
    assert re.search(fault.message, outcome.message), outcome.message
    assert outcome.exit_code == fault.exit_code
    assert not outcome.left
    if fault.ends_ranks:
        assert outcome.ranks_seconds < LEASE_SECONDS + ALLOWED_SECONDS


def test_a_run_that_resumes_after_each_fault_ends_with_the_same_weights_as_one_without(
    fault_runner: ClusterRunner, outcome_of: Callable[[Fault], Outcome], one_host: Callable[[int], Any]
) -> None:
    outcome_of(HARMLESS)
    folder = fault_runner.root / HARMLESS.root / "runs" / RUN
    assert cluster_runs.weights(folder) == one_host(2)
    first, *others = [TrainJob.read(path).resume_tag for path in sorted(folder.glob("attempts/*/spec.json"))]
    assert first is None
    assert len(others) == len(ENDING_RANKS)
    assert None not in others


def test_at_least_a_quarter_of_the_faults_run_in_ci() -> None:
    assert 4 * len(CHOSEN) >= len(FAULTS)

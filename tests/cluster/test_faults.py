"""A fault in a run over several hosts ends the run everywhere, is named, and loses only steps since the checkpoint.

Covers a third of the rows of docs/faults.md; `make faults` runs them all. To start fewer runs, all faults that end a
command are injected into the same run, one after the other. Those that preflight refuses come first, because they
start no attempt.
"""

import re
from collections.abc import Callable

import pytest

from t5train.files.run_folder import FAILURES
from t5train.spec.rank_job import TrainJob
from tests.acceptance.fault_cases import FAULTS, LEASE_SECONDS, Fault
from tests.acceptance.fault_table import ALLOWED_SECONDS, SETTINGS, Outcome, final_weights, inject
from tests.support.cluster_runs import ClusterRunner

pytestmark = pytest.mark.cluster

RUN = "faults"
CHOSEN = sorted((fault for fault in FAULTS if fault.in_ci), key=lambda fault: fault.strike is not None)
ENDING_RANKS = [fault for fault in CHOSEN if fault.ends_ranks]
HARMLESS = [fault for fault in CHOSEN if fault.exit_code == 0]


@pytest.fixture(scope="module")
def fault_runner(runner: ClusterRunner) -> ClusterRunner:
    """The runner with settings for faults: a short lease, a short grace period and no retries."""
    return ClusterRunner(runner.cluster, runner.root, {**runner.settings, **SETTINGS})


@pytest.fixture(scope="module")
def outcome_of(fault_runner: ClusterRunner) -> Callable[[Fault], Outcome]:
    """``outcome_of(fault)``: what the run did after the fault, which is injected only once."""
    outcomes: dict[str, Outcome] = {}

    def outcome_of(fault: Fault) -> Outcome:
        if fault.name not in outcomes:
            # Without the record of earlier failures, so that no message names their hosts.
            (fault_runner.root / "runs" / RUN / FAILURES).unlink(missing_ok=True)
            outcomes[fault.name] = inject(fault_runner, fault, fault.run if fault in HARMLESS else RUN)
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


@pytest.mark.parametrize("harmless", HARMLESS, ids=[fault.name for fault in HARMLESS])
def test_a_run_that_resumes_after_each_fault_ends_with_the_same_weights_as_one_without(
    harmless: Fault, fault_runner: ClusterRunner, outcome_of: Callable[[Fault], Outcome]
) -> None:
    for fault in CHOSEN:
        outcome_of(fault)
    assert final_weights(fault_runner, ENDING_RANKS[-1], RUN) == final_weights(fault_runner, harmless)
    specs = sorted((fault_runner.root / "runs" / RUN).glob("attempts/*/spec.json"))
    first, *others = [TrainJob.read(path).resume_tag for path in specs]
    assert first is None
    assert len(others) == len(ENDING_RANKS)
    assert None not in others


def test_at_least_a_third_of_the_faults_run_in_ci() -> None:
    assert 3 * len(CHOSEN) >= len(FAULTS)

"""A fault in a run over several hosts ends the run everywhere, is named, and loses only steps since the checkpoint.

Covers a third of the rows of docs/faults.md; `make faults` runs them all.
"""

import re
from typing import Any

import pytest

from tests.acceptance.fault_cases import FAULTS, LEASE_SECONDS, Fault
from tests.acceptance.fault_table import ALLOWED_SECONDS, SETTINGS, final_weights, inject, undisturbed_weights
from tests.support.cluster_runs import ClusterRunner

pytestmark = pytest.mark.cluster

CHOSEN = [fault for fault in FAULTS if fault.in_ci]
RUNS = {fault.run: fault for fault in CHOSEN}


@pytest.fixture(scope="module")
def fault_runner(runner: ClusterRunner) -> ClusterRunner:
    """The runner with settings for faults: a short lease, a short grace period and no retries."""
    return ClusterRunner(runner.cluster, runner.root, {**runner.settings, **SETTINGS})


@pytest.fixture(scope="module")
def expected_weights(fault_runner: ClusterRunner) -> Any:
    """Final weights of a run without a fault."""
    return undisturbed_weights(fault_runner)


@pytest.mark.parametrize("fault", CHOSEN, ids=[fault.name for fault in CHOSEN])
def test_a_fault_is_detected_and_named_and_leaves_nothing_running(fault: Fault, fault_runner: ClusterRunner) -> None:
    outcome = inject(fault_runner, fault)
    assert re.search(fault.message, outcome.message), outcome.message
    assert outcome.exit_code == fault.exit_code
    assert not outcome.left
    if fault.ends_ranks:
        assert outcome.ranks_seconds < LEASE_SECONDS + ALLOWED_SECONDS


@pytest.mark.parametrize("run", RUNS)
def test_a_run_after_a_fault_ends_with_the_same_weights_as_one_without(
    run: str, fault_runner: ClusterRunner, expected_weights: Any
) -> None:
    assert final_weights(fault_runner, RUNS[run]) == expected_weights


def test_at_least_a_third_of_the_faults_run_in_ci() -> None:
    assert 3 * len(CHOSEN) >= len(FAULTS)

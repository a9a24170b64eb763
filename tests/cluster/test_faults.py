"""A fault in a run over several hosts ends the run everywhere, is named, and loses only steps since the checkpoint.

Covers a third of the rows of docs/faults.md; `make faults` runs them all.
"""

import re
from typing import Any

import pytest

from tests.acceptance.fault_cases import FAULTS, LEASE_SECONDS, Fault
from tests.acceptance.fault_table import ALLOWED_SECONDS, SETTINGS, final_weights, inject, undisturbed_weights
from tests.support.cluster_runs import Stage

pytestmark = pytest.mark.cluster

CHOSEN = [fault for fault in FAULTS if fault.in_ci]
RUNS = {fault.run: fault for fault in CHOSEN}


@pytest.fixture(scope="module")
def faulty(stage: Stage) -> Stage:
    """The stage with settings for faults: a short lease, a short grace period and no retries."""
    return Stage(stage.cluster, stage.root, {**stage.settings, **SETTINGS})


@pytest.fixture(scope="module")
def undisturbed(faulty: Stage) -> Any:
    """Final weights of a run without a fault."""
    return undisturbed_weights(faulty)


@pytest.mark.parametrize("fault", CHOSEN, ids=[fault.name for fault in CHOSEN])
def test_a_fault_is_noticed_named_and_leaves_nothing(fault: Fault, faulty: Stage) -> None:
    outcome = inject(faulty, fault)
    assert re.search(fault.message, outcome.message), outcome.message
    assert outcome.exit_code == fault.exit_code
    assert not outcome.left
    if fault.ends_ranks:
        assert outcome.ranks_seconds < LEASE_SECONDS + ALLOWED_SECONDS


@pytest.mark.parametrize("run", RUNS)
def test_a_faulty_run_ends_with_the_weights_of_a_run_without_a_fault(run: str, faulty: Stage, undisturbed: Any) -> None:
    assert final_weights(faulty, RUNS[run]) == undisturbed


def test_a_third_is_done() -> None:
    assert 3 * len(CHOSEN) >= len(FAULTS)

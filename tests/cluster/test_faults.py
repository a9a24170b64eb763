"""What happens to a run over hosts is noticed, named, ends everywhere and costs no step but those since the checkpoint.

A third of the rows of docs/faults.md; `make faults` does them all.
"""

import re
from typing import Any

import pytest

from tests.acceptance.fault_cases import FAULTS, LEASE_SECONDS, Fault
from tests.acceptance.fault_table import ALLOWED_SECONDS, SETTINGS, do, goes_on_to, undisturbed_weights
from tests.support.cluster_runs import Stage

pytestmark = pytest.mark.cluster

CHOSEN = [fault for fault in FAULTS if fault.in_ci]
RUNS = {fault.run: fault for fault in CHOSEN}


@pytest.fixture(scope="module")
def faulty(stage: Stage) -> Stage:
    """Runs with short tolerances."""
    return Stage(stage.cluster, stage.root, {**stage.settings, **SETTINGS})


@pytest.fixture(scope="module")
def undisturbed(faulty: Stage) -> Any:
    """What runs end with to which nothing happens."""
    return undisturbed_weights(faulty)


@pytest.mark.parametrize("fault", CHOSEN, ids=[fault.what for fault in CHOSEN])
def test_a_fault_is_noticed_named_and_leaves_nothing(fault: Fault, faulty: Stage) -> None:
    outcome = do(faulty, fault)
    assert re.search(fault.told, outcome.told), outcome.told
    assert outcome.exit_code == fault.exit_code
    assert not outcome.left
    if fault.ends_ranks:
        assert outcome.ranks_seconds < LEASE_SECONDS + ALLOWED_SECONDS


@pytest.mark.parametrize("run", RUNS)
def test_the_run_goes_on_to_the_weights_of_one_to_which_nothing_happened(
    run: str, faulty: Stage, undisturbed: Any
) -> None:
    assert goes_on_to(faulty, RUNS[run]) == undisturbed


def test_a_third_is_done() -> None:
    assert 3 * len(CHOSEN) >= len(FAULTS)

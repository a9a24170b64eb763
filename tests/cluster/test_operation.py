"""A run that Prefect operates survives what kills its operators. `make operation-faults` does this a hundred times."""

import shutil
from pathlib import Path

import pytest

from tests.acceptance.operation.operation_faults import FAULTS
from tests.acceptance.operation.operation_kills import play_round, undisturbed_weights
from tests.acceptance.operation.operation_site import Site

pytestmark = pytest.mark.cluster


def test_a_run_whose_worker_and_server_are_killed_is_resumed_and_published_bit_equal(
    tmp_path: Path, prepared: Path
) -> None:
    faults = [fault for fault in FAULTS if fault.name in {"the worker is killed", "the server is killed"}]
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    with Site.up(tmp_path, **{"optimizer.num_steps": 100, "storage.validate_every_steps": 100}) as site:
        outcomes = play_round(site, 1, faults, undisturbed_weights(site))
    assert len(outcomes) == len(faults)
    # However long it takes: of several clients that write at once, one may wait for SQLite's lock for a minute.
    assert [each for each in outcomes if not each.is_survived] == []
    assert {each.fault for each in outcomes if each.ended_attempt} >= {"the worker is killed"}

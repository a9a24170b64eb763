"""The peer runs on its own, with as many ranks as a case, and ends with it."""

import os
from pathlib import Path

import pytest

from infra.head.regression.peer_processes import PeerJob, running_peer
from infra.node import processes
from t5train.errors import RegressionError
from t5train.model.model_shape import huggingface_config, resolve
from t5train.progress import silent
from t5train.regression import peer_loop
from t5train.regression.regression_cases import CASES, RegressionCase

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_ranks")]


def job_of(case: RegressionCase) -> PeerJob:
    shape = resolve(case.spec(Path("/root"), "run").model, 600)
    return PeerJob(huggingface_config(shape, pad_id=0, eos_id=1), sequences=4, input_tokens=16, target_tokens=8)


def peers() -> set[int]:
    of_this_test = processes.find(processes.child_of(os.getpid()))
    return of_this_test & processes.find(processes.given("t5train.regression.peer_loop"))


def test_two_ranks_are_timed_step_by_step_and_end_with_the_block(tmp_path: Path) -> None:
    with running_peer(job_of(CASES[0]), 2, tmp_path, silent) as peer:
        times = peer.timed(3)
        assert len(peers()) == 2
    assert len(times.seconds) == len(times.cpu_seconds) == 3
    assert min(*times.seconds, *times.cpu_seconds) > 0
    assert not peers()


def test_a_peer_that_cannot_run_is_reported_with_its_log(tmp_path: Path) -> None:
    broken = job_of(CASES[0])._replace(config={"d_model": "wide"})
    refused = pytest.raises(RegressionError, match=f"read its output in {tmp_path / 'peer.log'}")
    with refused, running_peer(broken, 1, tmp_path, silent):
        pass
    assert "wide" in (tmp_path / "peer.log").read_text()


def test_both_sides_agree_about_the_job() -> None:
    assert peer_loop.PeerJob._fields == PeerJob._fields

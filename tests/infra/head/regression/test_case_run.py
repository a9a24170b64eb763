"""How the steps of a run become one number, and what becomes of a case that fails."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.head.hosts.node_client import Nodes
from infra.head.regression import case_run
from infra.head.regression.case_run import CaseRun, cpu_seconds, on_available_accelerators, quartile
from infra.head.regression.case_stages import NightData
from infra.node.inspection.accelerators import can_have_any
from t5train.errors import HostError, RegressionError, StorageError
from t5train.progress import Progress, silent
from t5train.regression.regression_cases import RegressionCase, chosen_cases
from t5train.spec import MachinesSpec
from tests.support.simulated_nodes import ThisMachine

DATA = NightData(None, SimpleNamespace(counts={"vocab_size": 1024, "pad_id": 0, "eos_id": 1}))


@pytest.mark.parametrize(
    ("at", "error", "problem"),
    [
        ("train_case", StorageError("the disk is full"), "training failed: the disk is full"),
        ("train_case", KeyError("loss"), "training failed: KeyError: 'loss'"),
        ("running_peer", RegressionError("the peer ended"), "measuring failed: the peer ended"),
    ],
)
def test_whatever_fails_is_a_problem_of_the_case_and_not_of_the_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: Exception, problem: str
) -> None:
    @contextmanager
    def peer(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(timed=lambda _: None)

    def fails(*arguments: object) -> None:
        progress: Progress = arguments[-1]  # it is told before the failure
        progress("steps", 1, 60)
        raise error

    monkeypatch.setattr(case_run, "running_peer", peer)
    monkeypatch.setattr(case_run, at, fails)
    (case,) = chosen_cases(["smoke"], None, 0)
    result = CaseRun(case, tmp_path, DATA, silent).measure(lambda _: False)
    assert (result.problems, result.measured) == ([problem], {})


def test_a_quarter_of_slow_steps_and_slow_first_steps_change_no_quartile() -> None:
    steps = [0.05] * 60
    disturbed = [2.0] * 5 + [0.05 if number % 2 else 0.4 for number in range(55)]
    assert quartile(disturbed) == quartile(steps) == 0.05


def test_the_quartile_of_steps_is_their_lower_one() -> None:
    steps = [float(number) for number in range(100)]
    random.Random(0).shuffle(steps)
    assert quartile([0.0] * 5 + steps) == 25.0


def test_cpu_time_includes_processes_that_have_ended() -> None:
    before_others, before = cpu_seconds(), time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert cpu_seconds() - before_others > time.process_time() - before


@pytest.fixture
def on_hosts(tmp_path: Path) -> RegressionCase:
    """The case on hosts, with a hostfile of one host."""
    (tmp_path / "hosts").write_text("near slots=1\n")
    (case,) = chosen_cases(["hosts"], tmp_path / "hosts", 1)
    return case


def reach(monkeypatch: pytest.MonkeyPatch, *lost: str) -> None:
    """Make this machine stand for all hosts but ``lost`` ones."""

    @contextmanager
    def reached_nodes(_: MachinesSpec, hosts: Sequence[str]) -> Iterator[tuple[Nodes, dict[str, HostError]]]:
        yield Nodes(ThisMachine(*lost), tuple(hosts)), {}

    monkeypatch.setattr(case_run, "reached_nodes", reached_nodes)


@pytest.mark.skipif(can_have_any(), reason="this machine may have an accelerator")
def test_the_case_on_hosts_runs_on_cpus_if_hosts_have_no_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_hosts: RegressionCase
) -> None:
    reach(monkeypatch)
    on_cpus = on_available_accelerators(on_hosts, on_hosts.spec(tmp_path, "run")).spec(tmp_path, "run")
    assert on_hosts.spec(tmp_path, "run").cluster.accelerator is None
    assert on_cpus.cluster.accelerator == "cpu"


def test_a_host_that_does_not_answer_is_a_problem_of_the_case_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_hosts: RegressionCase
) -> None:
    reach(monkeypatch, "near")
    [problem] = CaseRun(on_hosts, tmp_path, DATA, silent).measure(lambda _: False).problems
    assert problem.startswith("asking the hosts failed: near")

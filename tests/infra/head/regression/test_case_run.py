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

from infra.head.hosts.nodes import Nodes
from infra.head.regression import case_run
from infra.head.regression.case_run import CaseRun, cpu_seconds, on_available_accelerators, quartile
from infra.head.regression.case_stages import NightData, TrainedCase
from infra.node.inspection.hardware import can_have_any
from t5train.errors import HostError, LaunchError, StorageError
from t5train.progress import silent
from t5train.regression.night_results import CaseResult
from t5train.regression.peer_loop import StepTimes
from t5train.regression.regression_cases import RegressionCase, chosen_cases
from t5train.regression.regression_findings import unsteady
from t5train.spec import MachinesSpec
from tests.support.simulated_nodes import ThisMachine

DATA = NightData(None, SimpleNamespace(counts={"vocab_size": 1024, "pad_id": 0, "eos_id": 1}))


def measured(folder: Path) -> CaseResult:
    (case,) = chosen_cases(["smoke"], None, 0)
    return CaseRun(case, folder, DATA, silent).measure(lambda _: False)


@pytest.mark.parametrize(
    ("at", "error", "problem"),
    [
        ("train_case", StorageError("the disk is full"), "training failed: the disk is full"),
        ("train_case", KeyError("loss"), "training failed: KeyError: 'loss'"),
        ("run_ranks", LaunchError("rank 0 ended"), "measuring failed: rank 0 ended"),
    ],
)
def test_whatever_fails_is_a_problem_of_the_case_and_not_of_the_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: Exception, problem: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    if at != "run_ranks":
        monkeypatch.setattr(CaseRun, "_peer_times", lambda _: None)
    monkeypatch.setattr(case_run, at, fails)
    result = measured(tmp_path)
    assert (result.problems, result.measured) == ([problem], {})


def simulate(monkeypatch: pytest.MonkeyPatch, save_seconds: list[float]) -> None:
    """Let every stage do nothing, and every run take steps of 0.2 s and a save of the next of ``save_seconds``."""
    witness = SimpleNamespace(tensors={}, device_type="cpu")
    times = {"seconds": 0.2, "cpu_seconds": 0.1, "process_cpu_seconds": 5.0, "host_memory_bytes": 10**9}
    steps = [{"step": step, **times} for step in range(1, 61)]
    saves = iter(save_seconds)

    def train_case(*_: object) -> TrainedCase:
        return TrainedCase(SimpleNamespace(), witness, steps, [("loss of step 1", 6.0)], [next(saves), 9.0], [0.3, 0.2])

    monkeypatch.setattr(CaseRun, "_peer_times", lambda _: StepTimes([0.1] * 60, [0.05] * 60))
    monkeypatch.setattr(case_run, "train_case", train_case)
    monkeypatch.setattr(case_run, "sharding", lambda *_: time.process_time)
    monkeypatch.setattr(CaseRun, "_check_resume", lambda _: None)
    for stage in ("consolidation", "exporting", "certification"):
        monkeypatch.setattr(case_run, stage, lambda *_: None)


def test_saving_validation_and_every_stage_are_measured_as_multiples_of_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, [1.0, 1.5, 2.0])
    monkeypatch.setattr(case_run, "unsteady", lambda _: [])
    result = measured(tmp_path)
    assert result.problems == []
    stages = ("training", "consolidation", "export", "certification", "sharding")
    of_stages = {name for stage in stages for name in (stage, f"{stage}, wall")}
    assert result.measured.keys() == {"step", "step, CPU", "host memory", "saving", "validation", "peer", *of_stages}
    assert result.measured["saving"].values == pytest.approx([10.0, 15.0, 20.0])
    assert result.measured["export, wall"].values == [20.0] * 3, "what is that short varies by chance"
    assert result.measured["validation"].values == pytest.approx([2.0] * 3)
    assert (result.measured["saving"].minimum, result.measured["export, wall"].minimum) == (0.5, 0.75)


def test_repeats_that_differ_too_much_are_measured_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, [1.0, 1.0, 6.0, 1.0, 1.1, 1.2])
    monkeypatch.setattr(case_run, "unsteady", lambda result: unsteady(only_saving(result)))
    result = measured(tmp_path)
    assert result.measured["saving"].values == pytest.approx([10.0, 11.0, 12.0])


def only_saving(result: CaseResult) -> CaseResult:
    """Return the result without what takes next to no time here, and so varies by chance."""
    return result.model_copy(update={"measured": {"saving": result.measured["saving"]}})


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_two_ranks_of_the_peer_are_timed_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_run, "PEER_STEPS", 3)
    (case,) = chosen_cases(["moe"], None, 0)
    times = CaseRun(case, tmp_path, DATA, silent)._peer_times()
    assert len(times.seconds) == len(times.cpu_seconds) == 3
    assert min(*times.seconds, *times.cpu_seconds) > 0
    assert {path.name for path in (tmp_path / "peer").glob("*.log")} == {"rank-0.log", "rank-1.log"}


def test_a_quarter_of_slow_steps_and_slow_first_steps_do_not_change_the_lower_quartile() -> None:
    steps = [0.05] * 60
    disturbed = [2.0] * 5 + [0.05 if number % 2 else 0.4 for number in range(55)]
    assert quartile(disturbed) == quartile(steps) == 0.05
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
    spec = on_hosts.spec(tmp_path, "run")
    assert spec.cluster.accelerator is None
    assert on_available_accelerators(on_hosts, spec).spec(tmp_path, "run").cluster.accelerator == "cpu"


def test_a_host_that_does_not_answer_is_a_problem_of_the_case_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_hosts: RegressionCase
) -> None:
    reach(monkeypatch, "near")
    [problem] = CaseRun(on_hosts, tmp_path, DATA, silent).measure(lambda _: False).problems
    assert problem.startswith("asking the hosts failed: near")

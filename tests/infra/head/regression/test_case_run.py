"""How the steps of a run become one number, and what becomes of a case that fails."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.head.regression import case_run
from infra.head.regression.case_run import CaseRun, cpu_seconds, quartile
from infra.head.regression.case_stages import NightData
from t5train.errors import RegressionError, StorageError
from t5train.progress import Progress, silent
from t5train.regression.regression_cases import chosen_cases

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

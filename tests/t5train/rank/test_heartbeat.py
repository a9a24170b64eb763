import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t5train.files.run_folder import RANK_FILES
from t5train.rank import heartbeat
from t5train.rank.heartbeat import Beat, Heartbeat
from t5train.rank.preemption import StopRequest
from t5train.spec.cluster_spec import DeadlinesSpec

DEADLINES = DeadlinesSpec(start_seconds=1, compile_seconds=2, step_seconds=3, save_seconds=4, validate_seconds=5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a test moves it."""
    times = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[0])
    return times


def told(path: Path) -> Beat:
    beat = heartbeat.read(path)
    assert beat is not None
    return beat


def test_each_phase_has_its_deadline_and_the_first_step_that_of_compiling(tmp_path: Path, clock: list[float]) -> None:
    heart, path = Heartbeat(tmp_path / "beat", DEADLINES), tmp_path / "beat"
    heart.enter("compile", 0)
    assert told(path) == Beat(1000.0, "compile", 1000.0, 2, 0)
    seen = []
    for step, phase in ((5, "step"), (6, "step"), (6, "validate"), (6, "save"), (7, "step")):
        clock[0] += 0.1
        heart.enter(phase, step)  # type: ignore[arg-type] - each is a phase
        seen.append((told(path).phase, told(path).limit, told(path).step))
    assert seen == [("compile", 2, 5), ("step", 3, 6), ("validate", 5, 6), ("save", 4, 6), ("step", 3, 7)]


def test_a_step_may_take_ten_medians_of_those_before_it(tmp_path: Path, clock: list[float]) -> None:
    heart = Heartbeat(tmp_path / "beat", DEADLINES)
    for step, seconds in enumerate((100.0, 2.0, 2.0, 2.0)):
        heart.enter("step", step + 1)
        clock[0] += seconds
    heart.enter("save", 4)
    clock[0] += 500.0
    heart.enter("step", 5)
    assert told(tmp_path / "beat").limit == pytest.approx(20.0)


def test_signs_of_life_come_once_a_second_while_the_work_does_something_else(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    with Heartbeat(path, DEADLINES):
        first = told(path)
        assert (first.phase, first.limit) == ("start", 1)
        time.sleep(1.5)
        assert told(path).beat > first.beat
        assert told(path).since == first.since
    assert path.stat().st_size == 256


def test_a_rank_without_a_guard_keeps_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_FILES, raising=False)
    with Heartbeat.of_rank(DEADLINES) as heart:
        heart.enter("save", 1)


def test_a_sign_that_is_half_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "beat").write_text('{"beat": 1.0, "pha')
    assert heartbeat.read(tmp_path / "beat") is None
    assert heartbeat.read(tmp_path / "absent") is None


def test_a_rank_hears_sigterm_and_ends_by_it_no_more_than_it_wants() -> None:
    program = "from t5train.rank.preemption import StopRequest; import os, signal\nwith StopRequest() as told:\n"
    program += " before = told(); os.kill(os.getpid(), signal.SIGTERM); print(before, told())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == (
        "False True\n"
    )


def test_what_was_done_on_sigterm_before_is_done_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as told:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told()
    assert signal.getsignal(signal.SIGTERM) == before

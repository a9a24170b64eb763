import time
from pathlib import Path

import pytest

from t5train.files import heartbeat
from t5train.files.heartbeat import Beat, Heartbeat
from t5train.files.run_folder import RANK_FILES
from t5train.spec import DeadlinesSpec

DEADLINES = dict(
    DeadlinesSpec(
        start_seconds=1, compile_seconds=2, step_seconds=3, save_seconds=4, validate_seconds=5, predict_seconds=6
    )
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a test moves it."""
    times = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[0])
    return times


def read_beat(path: Path) -> Beat:
    beat = heartbeat.read(path)
    assert beat is not None
    return beat


def test_each_phase_has_its_deadline_and_the_first_step_has_the_compile_deadline(
    tmp_path: Path, clock: list[float]
) -> None:
    writer, path = Heartbeat(tmp_path / "beat", DEADLINES), tmp_path / "beat"
    writer.enter("compile", 0)
    assert read_beat(path) == Beat(1000.0, "compile", 1000.0, 2, 0)
    seen = []
    for step, phase in ((5, "step"), (6, "step"), (6, "validate"), (6, "predict"), (6, "save"), (7, "step")):
        clock[0] += 0.1
        writer.enter(phase, step)  # type: ignore[arg-type] - each is a phase
        seen.append((read_beat(path).phase, read_beat(path).limit, read_beat(path).step))
    between = [("validate", 5, 6), ("predict", 6, 6), ("save", 4, 6)]
    assert seen == [("compile", 2, 5), ("step", 3, 6), *between, ("step", 3, 7)]


def test_a_step_may_take_ten_times_the_median_of_earlier_steps(tmp_path: Path, clock: list[float]) -> None:
    writer = Heartbeat(tmp_path / "beat", DEADLINES)
    for step, seconds in enumerate((100.0, 2.0, 2.0, 2.0)):
        writer.enter("step", step + 1)
        clock[0] += seconds
    writer.enter("save", 4)
    clock[0] += 500.0
    writer.enter("step", 5)
    assert read_beat(tmp_path / "beat").limit == pytest.approx(20.0)


def test_the_heartbeat_is_renewed_every_second_while_the_rank_works(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    with Heartbeat(path, DEADLINES):
        first = read_beat(path)
        assert (first.phase, first.limit) == ("start", 1)
        deadline = time.monotonic() + 60
        while read_beat(path).beat == first.beat:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert read_beat(path).beat > first.beat
        assert read_beat(path).since == first.since
    assert path.stat().st_size == 256


def test_a_save_in_another_thread_is_reported_beside_the_phase_with_its_own_deadline(
    tmp_path: Path, clock: list[float]
) -> None:
    writer, path = Heartbeat(tmp_path / "beat", DEADLINES), tmp_path / "beat"
    writer.note_writing(7)
    clock[0] += 1
    writer.enter("validate", 8)
    assert read_beat(path) == Beat(1001.0, "validate", 1001.0, 5, 8, save_step=7, save_since=1000.0, save_limit=4)
    assert path.stat().st_size == 256
    writer.note_writing(None)
    assert read_beat(path) == Beat(1001.0, "validate", 1001.0, 5, 8)


def test_a_rank_without_a_guard_writes_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_FILES, raising=False)
    with Heartbeat.of_rank(DEADLINES) as writer:
        writer.enter("save", 1)


def test_a_half_written_heartbeat_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "beat").write_text('{"beat": 1.0, "pha')
    assert heartbeat.read(tmp_path / "beat") is None
    assert heartbeat.read(tmp_path / "absent") is None

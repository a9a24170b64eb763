"""The state of a run is told from its folder alone: at once, without a lock, and even if some files are damaged."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.head.launch.held_run import hold_run
from infra.head.launch.start_record import note_stage
from infra.head.runs.run_state import State, run_state, run_states
from infra.node.attempts import attempt, run_lock
from infra.node.attempts.attempt import Attempt
from infra.node.processes import ProcessIdentity
from t5train.checkpoint import resume_point, sidecar
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.errors import InputError, LaunchError
from t5train.files import heartbeat
from t5train.files.heartbeat import Beat, Phase
from tests.support.held_runs import end_with, held_by_another, kill_holder
from tests.support.simulated_nodes import make_sidecar

SPEC = {"spec": {"recipe": "smoke", "optimizer": {"num_steps": 65536}}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has trained 8 steps and saved a checkpoint after 4."""
    folder = tmp_path / "runs" / "mine"
    write_run(folder)
    return folder


def write_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(SPEC))
    lines = [{"step": step, "loss": 8 - step / 4, "tokens_per_second": 1000.0, "seconds": 0.5} for step in range(1, 9)]
    lines.append({"step": 8, "validation_loss": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    save(folder, 4)
    resume_point.note_complete(folder, "step-00000004")


def save(folder: Path, step: int, world_size: int = 1) -> None:
    tag = folder / "checkpoints" / f"step-{step:08d}"
    tag.mkdir(parents=True)
    sidecar.write(tag, make_sidecar(0, step, {}, world_size))


def told(run: Path) -> tuple[State, str | None]:
    found = run_state(run)
    return found.state, found.error


def test_the_figures_of_a_failed_run_are_those_of_its_last_step_and_checkpoint(run: Path) -> None:
    end_with(run, LaunchError("rank 0 was killed"))
    found = run_state(run)
    assert (found.name, found.state, found.error) == ("mine", State.FAILED, "rank 0 was killed")
    assert (found.step, found.num_steps, found.resumable_step) == (8, 65536, 4)
    assert (found.loss, found.tokens_per_second) == (6.0, 1000.0)
    assert 0 <= (found.seconds_since_activity or 0) < 60


def test_a_run_whose_process_was_killed_is_crashed_and_one_that_is_held_is_running(run: Path) -> None:
    with held_by_another(run) as process:
        found = run_state(run)
        assert found.state == State.RUNNING
        assert str(found.holder).startswith(f"process {process.pid} on ")
        process.kill()
        process.wait()
    assert told(run) == (State.CRASHED, None)
    (run / "last-start.json").unlink()
    kill_holder(run, "run_lock")
    assert not (run / "last-start.json").exists(), "earlier versions wrote none"
    assert told(run) == (State.CRASHED, None)


def test_a_run_ends_as_its_last_start_did(run: Path) -> None:
    end_with(run, KeyboardInterrupt())
    assert told(run) == (State.INTERRUPTED, None)
    assert not run_state(run).has_ended_early
    end_with(run, LaunchError("one\ntwo"))
    assert told(run) == (State.FAILED, "one\ntwo")
    (run / "manifest.json").write_text("{}")
    assert told(run) == (State.FAILED, "one\ntwo"), "such as a publication that failed"
    with hold_run(run):
        pass
    assert told(run) == (State.TRAINED, None)
    assert run_state(run).has_ended_early, "after 8 of 65,536 steps"
    (run / "published.json").write_text('{"url": "s3://there/mine"}')
    assert run_state(run).published == "s3://there/mine"
    end_with(run, InputError("no such file"))
    assert told(run) == (State.PUBLISHED, None), "a later command that fails unpublishes nothing"
    (run / "manifest.json").unlink()
    end_with(run, KeyboardInterrupt())
    again = run_state(run)
    assert (again.state, again.stage, again.has_ended_early) == (State.INTERRUPTED, None, False), (
        "trained beyond its end"
    )
    assert again.published == "s3://there/mine"


def test_a_run_that_was_published_and_begins_again_is_no_longer_published(run: Path) -> None:
    (run / "manifest.json").write_text("{}")
    (run / "published.json").write_text('{"url": "s3://there/mine"}')
    ask_to_begin_again(run)
    found = run_state(run)
    assert found.state == State.STOPPED
    assert found.resumable_step is None, "its checkpoints are about to be moved aside"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (State.NOT_BEGUN, None)),
        ({"run.json": json.dumps(SPEC)}, (State.STOPPED, None)),
        ({"run.json": json.dumps(SPEC), "manifest.json": "{}"}, (State.TRAINED, None)),
        ({"manifest.json": "{}", "published.json": "{}"}, (State.PUBLISHED, None)),
        ({"report/failure.md": "# Train failed\n\n**Why:** the disk\n\n"}, (State.FAILED, "the disk")),
    ],
)
def test_runs_of_earlier_versions_are_told_by_the_files_that_these_wrote(
    tmp_path: Path, files: dict[str, str], expected: tuple[State, str | None]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert told(tmp_path) == expected


def begin_attempt(run: Path, phase: Phase, beat: float | None = None, hosts: Any = None) -> Attempt:
    this = attempt.begin(run, ProcessIdentity.of(os.getpid()), hosts=hosts)
    heartbeat.write(this.folder / "rank-00000.beat", Beat(beat or time.monotonic(), phase, 0.0, 0.0, 8))
    return this


def age(run: Path, seconds: float, *names: str) -> None:
    for name in names:
        at = time.time() - seconds
        os.utime(run / name, (at, at))


def test_a_running_run_shows_what_it_does_and_how_long_that_takes(run: Path) -> None:
    with hold_run(run):
        begin_attempt(run, "step")
        age(run, -5, "metrics.jsonl")
        note_stage(run, "Train")
        found = run_state(run)
        assert (found.state, found.stage, found.tokens_per_second) == (State.RUNNING, "Train: training", 1000.0)
        assert found.seconds_left == (65536 - 8) * 0.5
        begin_attempt(run, "save")
        age(run, -5, "metrics.jsonl")
        assert run_state(run).stage == "Train: saving"
    assert run_state(run).seconds_left is None, "it no longer trains"


def test_a_run_that_resumes_shows_no_figures_of_the_attempt_before(run: Path) -> None:
    begin_attempt(run, "step")
    age(run, 60, "metrics.jsonl", "attempts/0001/attempt.json")
    with hold_run(run):
        found = run_state(run)
        assert (found.stage, found.step, found.tokens_per_second, found.seconds_left) == ("preparing", 8, None, None)
        note_stage(run, "Get the text")
        assert run_state(run).stage == "Get the text"
        begin_attempt(run, "compile")
        found = run_state(run)
        assert found.stage == "Get the text: preparing the first step"
        assert (found.tokens_per_second, found.seconds_left) == (None, None)


def test_a_phase_is_shown_unless_it_is_old_and_for_how_long_if_that_is_unusual(run: Path) -> None:
    with hold_run(run):
        begin_attempt(run, "save", beat=time.monotonic() - 60)
        assert run_state(run).stage == "training", "the heartbeat is old"
        this, now = begin_attempt(run, "save", hosts={"node1": (0,)}), time.monotonic()
        assert run_state(run).stage == "training", "the head knows no phase of ranks on hosts yet"
        heartbeat.write(this.folder / "head.beat", Beat(now, "save", now - 100, 1800, 8))
        assert run_state(run).stage == "saving"
        heartbeat.write(this.folder / "head.beat", Beat(now, "save", now - 425, 1800, 8))
        assert run_state(run).stage == "saving for 7 min"


def test_a_newer_checkpoint_without_all_sidecars_is_not_resumable(run: Path) -> None:
    save(run, 8, world_size=2)
    assert run_state(run).resumable_step == 4
    save(run, 12)
    assert run_state(run).resumable_step == 12
    (run / "last-seen.json").unlink()
    assert run_state(run).resumable_step == 12


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("run.json", content) for content in ("{", "[]", '{"spec": {}}')),
        *(("published.json", "half"), ("last-start.json", "{"), ("last-seen.json", "[1]"), ("report/failure.md", None)),
    ],
)
def test_a_damaged_record_is_named_in_the_row_of_its_run_and_hides_no_other(
    run: Path, name: str, content: str | None
) -> None:
    write_run(run.with_name("other"))
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content) if content is not None else path.mkdir()
    mine, other = run_states(run.parent.parent)
    assert mine.state == State.UNREADABLE
    assert mine.error
    assert (other.name, other.state, other.step) == ("other", State.STOPPED, 8)


def test_only_the_ends_of_long_files_are_read_and_nothing_in_runs_changes(run: Path) -> None:
    line = json.dumps({"step": 7, "loss": 4.0, "seconds": 0.5, "more": "x" * 200}) + "\n"
    for number in range(19):
        folder = run.with_name(f"run{number}")
        write_run(folder)
        (folder / "metrics.jsonl").write_text(line * 5000)
        (folder / "lock").touch()
    root = run.parent.parent
    before = {path: path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}
    assert len(run_states(root)) == 20
    read = bytes_read()
    states = run_states(root)
    assert bytes_read() - read < 20 * 5000 * len(line) / 4
    assert all(state.state == State.STOPPED for state in states)
    assert {path: path.stat().st_mtime_ns for path in sorted(root.rglob("*"))} == before


def bytes_read() -> int:
    """How many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_runs_can_be_started_while_somebody_looks_at_them_all_the_time(run: Path) -> None:
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            run_state(run)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for _ in range(20):
            with hold_run(run):
                pass
        ended.set()
        looking.result()


def test_a_run_of_a_machine_that_went_down_is_told_at_once_unless_it_may_still_be_held_elsewhere(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(run_lock.run_lease, "holder_elsewhere", asked.append)
    kill_holder(run)
    holder = json.loads((run / "holder.json").read_text()) | {"boot_id": "of another boot"}
    (run / "holder.json").write_text(json.dumps(holder))
    assert told(run) == (State.CRASHED, None)
    assert asked, "its lease was renewed a moment ago"
    asked.clear()
    age(run, 3600, "holder.json")
    assert told(run) == (State.CRASHED, None)
    assert not asked


def test_status_imports_neither_torch_nor_transformers_nor_prefect(
    run_python: Callable[..., subprocess.CompletedProcess[str]], run: Path
) -> None:
    program = (
        "import sys; from flows.cli.__main__ import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'prefect', 'deepspeed'} & {*sys.modules}))"
    )
    for arguments in ((), ("mine",), ("--json",)):
        output = run_python(program, "status", *arguments, "--root", str(run.parent.parent)).stdout
        assert output.endswith("[]\n"), output

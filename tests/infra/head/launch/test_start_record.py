"""The record of a run's last start says how it ended, whatever ended it, and never makes a run fail."""

import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from infra.head.launch import start_record
from infra.head.launch.held_run import hold_run
from infra.head.launch.start_record import Ending, Start, note_cancelled, note_stage, read_start
from infra.head.stop_signal import Stopped
from t5train.errors import LaunchError, Preempted, RecordError, RunChanged, StorageError
from tests.support.held_runs import end_with, held_by_another
from tests.support.small_disk import run_with_disk

FILLS_THE_DISK = """
import sys
from pathlib import Path
from infra.head.launch.held_run import hold_run
from infra.head.launch.start_record import read_start
from t5train.errors import LaunchError

run = Path(sys.argv[1]) / "run"
try:
    with hold_run(run):
        with open(run / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        raise LaunchError("the cause " + chr(0x2603) * 5000)
except LaunchError:
    ended = read_start(run)
    print(f"{ended.how}: {ended.error}")
"""


def recorded(run: Path) -> Start:
    found = read_start(run)
    assert found is not None
    return found


def test_a_start_that_ends_well_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/bin/t5-pretrain", "run", "smoke", "--name", "it is"])
    with hold_run(tmp_path):
        begun = recorded(tmp_path)
        assert (begun.pid, begun.ended_at, begun.how) == (os.getpid(), None, None)
    ended = recorded(tmp_path)
    assert (ended.how, ended.error, ended.started_at) == (Ending.FINISHED, None, begun.started_at)
    assert ended.ended_at is not None
    assert ended.command == "t5-pretrain run smoke --name 'it is'"
    assert ended.is_own_program
    assert ended.working_folder == str(Path.cwd())


def cancelled() -> Stopped:
    signalled = Stopped()
    note_cancelled(signalled)
    return signalled


def raised_again() -> Stopped:
    """As after SIGTERM during a flow: Prefect sends it once more while it handles its own exception for it."""
    signalled = Stopped()
    signalled.__context__ = KeyboardInterrupt()  # any signal's exception
    return signalled


@pytest.mark.parametrize(
    ("error", "how", "text"),
    [
        (LaunchError("rank 1 was killed. Its output ends:\n  out of memory"), Ending.FAILED, "rank 1 was killed. Its "),
        (ZeroDivisionError("division by zero"), Ending.FAILED, "division by zero"),
        (Preempted("the ranks saved step 8"), Ending.INTERRUPTED, "the ranks saved step 8"),
        (KeyboardInterrupt(), Ending.INTERRUPTED, None),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), Ending.INTERRUPTED, None),
        (Stopped(), Ending.INTERRUPTED, None),
        (raised_again(), Ending.INTERRUPTED, None),
        (cancelled(), Ending.CANCELLED, None),
    ],
)
def test_each_way_to_end_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, how: Ending, text: str | None
) -> None:
    monkeypatch.setattr("infra.head.stop_signal.signal.raise_signal", lambda _number: None)
    end_with(tmp_path, error)
    found = recorded(tmp_path)
    assert found.how == how
    assert found.error is None if text is None else str(found.error).startswith(text)
    if isinstance(error, LaunchError):
        assert found.error == str(error), "the whole message, with all its lines"


def test_sigterm_between_stages_is_recorded_and_still_ends_the_process(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    found = recorded(tmp_path)
    assert found.how == Ending.INTERRUPTED
    assert json.loads((tmp_path / "holder.json").read_text())["is_released"]


def test_a_start_that_is_refused_because_the_run_has_other_settings_is_not_recorded(tmp_path: Path) -> None:
    end_with(tmp_path / "new", RunChanged("other settings"))
    assert read_start(tmp_path / "new") is None
    end_with(tmp_path / "old", LaunchError("the first"))
    end_with(tmp_path / "old", RunChanged("other settings"))
    assert recorded(tmp_path / "old").error == "the first"


def test_the_end_is_recorded_on_a_full_disk_and_does_not_hide_the_error(tmp_path: Path) -> None:
    result = run_with_disk(tmp_path, "1m", FILLS_THE_DISK, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"failed: the cause {chr(0x2603) * 1990} ...\n"


def test_a_record_that_cannot_be_written_neither_makes_a_run_fail_nor_hides_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = hold_run(tmp_path)
    run.__enter__()
    monkeypatch.setattr(start_record.os, "pwrite", full)
    assert not run.__exit__(LaunchError, LaunchError("the cause"), None), "the error is raised, and no other"
    assert "last-start.json cannot be written" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    (tmp_path / "last-start.json").unlink()
    (tmp_path / "last-start.json").mkdir()
    with hold_run(tmp_path):
        note_stage(tmp_path, "Train")
    assert "last-start.json cannot be written" in caplog.text


def test_a_stage_is_noted_only_by_the_process_that_holds_the_run(tmp_path: Path) -> None:
    with hold_run(tmp_path):
        note_stage(tmp_path, "Train")
        assert recorded(tmp_path).stage == "Train"
    note_stage(tmp_path, "Certify")
    assert recorded(tmp_path).stage == "Train", "the start has ended"
    with held_by_another(tmp_path) as process:
        note_stage(tmp_path, "Certify")
        assert recorded(tmp_path).stage is None, "another process holds the run"
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "command", "is_own"),
    [
        (["t5-pretrain", "\udcff"], "t5-pretrain '?'", True),
        (["t5-pretrain", "x" * 9000], "a command of 9,012 characters", False),
        (["/lib/flows/cli/__main__.py", "run"], "t5-pretrain run", True),
        (["/lib/prefect/flow_engine.py", "run"], "/lib/prefect/flow_engine.py run", False),
    ],
)
def test_any_command_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], command: str, is_own: bool
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    with hold_run(tmp_path):
        pass
    assert (recorded(tmp_path).command, recorded(tmp_path).is_own_program) == (command, is_own)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"how": "somehow", "command": "", "working_folder": ""}', "{"])
def test_a_damaged_record_is_reported_and_the_next_start_writes_it_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "last-start.json").write_text(content)
    with pytest.raises(RecordError, match=r"last-start.json is damaged"):
        read_start(tmp_path)
    end_with(tmp_path, StorageError("full"))
    assert recorded(tmp_path).error == "full"

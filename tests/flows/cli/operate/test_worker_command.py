"""``worker`` and ``up`` leave nothing behind, however they end."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli.operate import worker_command
from flows.cli.operate.worker_command import _check, worker_process
from infra.node import processes
from infra.node.attempts.attempt import STOP
from infra.node.attempts.process_guard import MODULE, stopping_attempts
from tests.support.waiting import await_that


def test_a_second_ctrl_c_while_runs_save_ends_the_worker_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    start = subprocess.Popen
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(sleeps, **options))
    monkeypatch.setattr(processes, "find", lambda _: {1})
    monkeypatch.setattr(processes, "end", interrupted)
    with pytest.raises(KeyboardInterrupt), worker_process("me", tmp_path / "log") as worker:
        raise KeyboardInterrupt
    assert worker.poll() is not None


def test_a_worker_ends_after_the_ranks_that_are_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def own() -> set[Path]:  # and not those that other tests stop at this time
        return stopping_attempts() & {tmp_path}

    (tmp_path / STOP).touch()
    guard = [sys.executable, "-c", "import sys; sys.stdin.read()", MODULE, str(tmp_path)]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", ""], **options))
    monkeypatch.setattr(worker_command, "stopping_attempts", own)
    with start(guard, stdin=subprocess.PIPE) as saving:
        await_that(own)
        monkeypatch.setattr(worker_command, "time", SimpleNamespace(sleep=lambda _: saving.stdin.close()))
        with worker_process("me", tmp_path / "log"):
            pass
        assert not own()
    assert f"waiting for ranks to save ({tmp_path})" in capsys.readouterr().out


def test_a_server_that_does_not_answer_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def gone() -> list[str]:
        raise RuntimeError("All connection attempts\nfailed")

    _check(gone)
    reported = "could not look after the runs in Prefect, will retry: All connection attempts failed"
    assert reported in capsys.readouterr().err

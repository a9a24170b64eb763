"""``worker`` and ``up`` leave nothing behind, however they end."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.operate.worker_command import _check, worker_process
from infra.node import processes


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


def test_a_server_that_does_not_answer_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def gone() -> list[str]:
        raise RuntimeError("All connection attempts\nfailed")

    _check(gone)
    reported = "could not look after the runs in Prefect, will retry: All connection attempts failed"
    assert reported in capsys.readouterr().err

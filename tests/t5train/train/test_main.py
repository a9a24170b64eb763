"""How the program of a rank ends."""

import gc
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import deepspeed
import pytest

from t5train.errors import Preempted, WeightsDidNotMove
from t5train.files import error_report, heartbeat
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe
from t5train.train import __main__ as program
from t5train.train import loop


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folders = {"run_folder": tmp_path, "shards_folder": tmp_path}
    job = TrainJob(spec=recipe("smoke"), run_fingerprint="0" * 64, resume_tag=None, **folders)
    (tmp_path / "spec.json").write_text(job.model_dump_json())
    return tmp_path / "spec.json"


def test_a_failed_rank_reports_its_error_and_ends_without_waiting_for_others(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise WeightsDidNotMove("3 steps, same weights")

    def wait_for_ever() -> None:
        raise AssertionError("the process group was taken down, for which all ranks are needed")

    monkeypatch.setenv("T5_RANK_FILES", str(job.parent / "rank-00000"))
    monkeypatch.setattr(sys, "argv", ["t5train.train", "--spec", str(job)])
    monkeypatch.setattr(deepspeed, "init_distributed", lambda: None)
    monkeypatch.setattr(deepspeed.comm, "destroy_process_group", wait_for_ever)
    monkeypatch.setattr(loop, "Trainer", fail)
    assert program.main() == 1
    assert isinstance(error_report.read(job.parent / "rank-00000"), WeightsDidNotMove)


def test_a_rank_imports_and_shows_life_while_the_head_still_writes_its_job(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = job.read_text()
    job.unlink()
    beats = list[heartbeat.Beat | None]()

    def note_beat(_: object) -> None:
        beats.append(heartbeat.read(job.parent / "rank-00000.beat"))

    def write_job(_seconds: float) -> None:
        note_beat(None)
        job.write_text(text)

    monkeypatch.setenv("T5_RANK_FILES", str(job.parent / "rank-00000"))
    monkeypatch.setattr(sys, "argv", ["t5train.train", "--spec", str(job), "--await-spec", "33"])
    monkeypatch.setattr(program, "_import", note_beat)
    monkeypatch.setattr(time, "sleep", write_job)
    monkeypatch.setattr(program, "_train", lambda of, *_: note_beat(of))
    assert program.main() == 0
    # Modules may hang while they are imported, but a head may verify for hours.
    limits = [33, math.inf, *[recipe("smoke").cluster.deadlines.start_seconds] * 3]
    assert [(beat.phase, beat.limit) for beat in beats if beat] == [("start", limit) for limit in limits]


@pytest.mark.parametrize("moment", ["_import", "sleep"])
def test_a_rank_that_is_asked_to_stop_before_its_job_is_there_reports_that_it_was_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def stop(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("T5_RANK_FILES", str(tmp_path / "rank-00000"))
    monkeypatch.setattr(sys, "argv", ["t5train.train", "--spec", str(tmp_path / "spec.json"), "--await-spec", "33"])
    monkeypatch.setattr(program, "_import", lambda _: None)
    monkeypatch.setattr(program if moment == "_import" else time, moment, stop)
    assert program.main() == 1
    assert isinstance(error_report.read(tmp_path / "rank-00000"), Preempted)


def test_the_error_of_an_import_is_not_hidden_by_that_of_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_library.py").write_text("raise ImportError('libnothing.so.1 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["t5train.train", "--spec", str(tmp_path / "spec.json"), "--await-spec", "33"])
    monkeypatch.setattr(program, "_IMPORTED", ("no_library",))
    assert program.main() == 1
    assert "libnothing.so.1 is missing" in capfd.readouterr().err
    assert gc.isenabled()


FAILING_WHILE_IT_SAVES = """
import runpy, sys, threading
from concurrent.futures import ThreadPoolExecutor
import deepspeed
from t5train.errors import WeightsDidNotMove
from t5train.train import loop

def fail(*_):
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    raise WeightsDidNotMove("3 steps, same weights")

deepspeed.init_distributed, loop.Trainer = lambda: None, fail
sys.argv = ["t5train.train", "--spec", sys.argv[1]]
runpy.run_module("t5train.train", run_name="__main__")
"""


@pytest.mark.slow
def test_a_failed_rank_does_not_wait_for_the_checkpoint_that_it_is_writing(job: Path) -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "T5_RANK_FILES": str(job.parent / "rank-00000")}
    command = [sys.executable, "-c", FAILING_WHILE_IT_SAVES, str(job)]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    assert isinstance(error_report.read(job.parent / "rank-00000"), WeightsDidNotMove)


def test_a_rank_notices_sigterm_and_is_not_ended_by_it_and_the_previous_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with program.StopRequest() as sigterm_received:
        assert not sigterm_received()
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm_received()
    assert signal.getsignal(signal.SIGTERM) == before

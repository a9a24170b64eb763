"""Weights & Biases: what a run sends, what a resume continues, and that its failures are logged and harmless."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from t5train.errors import TrainingError
from t5train.records.metrics import Metrics, Values
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe
from t5train.train import wandb_sync
from t5train.train.wandb_sync import SyncJob, WandbProcess
from tests.support.training import wandb_files

SECRET = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    settings = {"monitor.wandb": True, "monitor.wandb_mode": "offline", "storage.root": str(tmp_path), "name": "mine"}
    spec = recipe("smoke", settings)
    spec.run_folder.mkdir(parents=True)
    return TrainJob(
        spec=spec,
        run_fingerprint="f" * 64,
        run_folder=spec.run_folder,
        shards_folder=tmp_path,
        resume_tag=None,
        unique_id="0" * 32,
    )


def attempt(job: TrainJob, resume_step: int, lines: dict[int, Values]) -> None:
    """Write the lines of an attempt as rank 0 does."""
    with (
        Metrics(job.metrics_path, job.tensorboard_folder, resume_step) as metrics,
        WandbProcess(SyncJob.of(job, resume_step)),
    ):
        for step, values in lines.items():
            metrics.write(step, values)


def losses(path: Path) -> dict[int, float]:
    return {step: values["loss"] for step, values in wandb_files.history(path).items() if "loss" in values}


def test_a_resume_continues_the_same_wandb_run_and_sends_each_step_once(job: TrainJob) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    attempt(job, 0, {step: {"loss": float(step), "mfu": None} for step in range(6)})
    attempt(job, 3, {step: {"loss": step + 0.5} for step in range(4, 8)})
    first, second = wandb_files.segments(job.run_folder)
    assert first.name == second.name == f"run-{SyncJob.of(job, 0).run_id}.wandb"
    assert losses(first) == {step: float(step) for step in range(6)}
    assert losses(second) == {6: 6.5, 7: 7.5}
    assert "mfu" not in wandb_files.history(first)[1]


def test_training_that_begins_again_is_a_new_wandb_run(job: TrainJob) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    attempt(job, 0, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    attempt(job, 0, {1: {"loss": 1.5}})
    first, second = wandb_files.segments(job.run_folder)
    assert second.stem == f"{first.stem}-2"
    assert losses(second) == {1: 1.5}


def test_a_run_that_switches_wandb_on_later_sends_its_earlier_steps_too(job: TrainJob) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    with Metrics(job.metrics_path, job.tensorboard_folder, 0) as metrics:
        metrics.write(1, {"loss": 1.0})
    attempt(job, 1, {2: {"loss": 2.0}})
    assert losses(wandb_files.segments(job.run_folder)[0]) == {1: 1.0, 2: 2.0}


def test_neither_the_api_key_nor_paths_and_hosts_are_sent_or_stored(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    attempt(job, 0, {1: {"loss": 1.0}})
    content = b"".join(path.read_bytes() for path in job.run_folder.rglob("*") if path.is_file())
    assert SECRET.encode() not in content
    (path,) = wandb_files.segments(job.run_folder)
    assert str(job.run_folder).encode() not in path.read_bytes()
    run = next(record.run for record in wandb_files.records(path) if record.HasField("run"))
    assert (run.run_id, run.display_name, run.host, run.project) == (path.stem[4:], "mine", "", "t5-pretrain")
    assert {update.key for update in run.config.update} == {
        *("objective", "model", "optimizer", "layout", "ranks", "recipe", "run_fingerprint", "_wandb"),
    }


def test_a_wandb_that_fails_is_reported_once_and_training_continues(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/wandb.py").write_text(f"raise ImportError('no core for {SECRET}')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    attempt(job, 0, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    logged = capfd.readouterr().err
    assert logged.count("W&B gets no more metrics of this attempt, training continues: no core for") == 1
    assert SECRET not in logged
    assert "[secret]" in logged


def test_metrics_are_recorded_offline_if_the_server_never_answers(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with Metrics(job.metrics_path, job.tensorboard_folder, 0) as metrics:
        for step in range(3):
            metrics.write(step, {"loss": float(step)})
    program = "import sys; from t5train.train import wandb_sync as w; w._ANSWER_SECONDS = 2; sys.exit(w.main())"
    online = SyncJob.of(job, 0).model_copy(update={"mode": "online"})
    command, job_line = [sys.executable, "-c", program], online.model_dump_json()
    done = subprocess.run(command, input=job_line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = wandb_files.segments(job.run_folder)
    assert losses(path) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert done.stderr.count("the W&B server cannot be used (") == 1
    assert f"To send them yourself: wandb sync {path.parent}\n" in done.stderr
    assert SECRET not in done.stderr
    assert wandb_sync._Sent.read(online).step == -1, "the next attempt sends all steps"


def test_a_server_that_does_not_answer_is_tried_again_while_training_runs(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Exception | str] = [OSError("no route"), OSError("no route"), "the run"]
    package = SimpleNamespace(Error=OSError, teardown=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(wandb_sync, "_has_ended", lambda _seconds: False)

    def begin(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(wandb_sync, "_begin", begin)
    online = SyncJob.of(job, 0)
    assert wandb_sync._online(online, wandb_sync._Sent.read(online)) == "the run"
    assert caplog.text.count("it is tried again every 300 s") == 1


@pytest.mark.parametrize("error", [None, TrainingError("the loss is nan")])
def test_a_wandb_that_hangs_neither_slows_training_nor_keeps_it_from_ending(
    job: TrainJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/wandb.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(wandb_sync, "SECONDS_TO_END", 1.5)
    monkeypatch.setattr(wandb_sync, "SECONDS_AFTER_ERROR", 1.0)
    process = WandbProcess(SyncJob.of(job, 0))
    with Metrics(job.metrics_path, job.tensorboard_folder, 0) as metrics:
        began = time.monotonic()
        for step in range(1000):
            metrics.write(step, {"loss": 1.0})
        assert time.monotonic() - began < 1
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        process.__exit__(error and type(error), error, None)
    assert time.monotonic() - began < 20
    limit = 1.0 if error else 1.5
    assert f"W&B did not take the last metrics within {limit:.0f} s" in caplog.text

"""Weights & Biases: what a run sends, what a resume continues, and that its failures are logged and harmless."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread, Timer

import pytest

from t5train.errors import TrainingError
from t5train.records.metrics import Metrics, Values
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe
from t5train.train import wandb_sync
from t5train.train.wandb_sync import SyncJob, WandbProcess
from tests.support.prepared_python import prepared_python
from tests.support.training import wandb_files
from tests.support.waiting import await_that

HANG_SECONDS = 500
SECRET = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def python_with_wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    modules = ["t5train.train.wandb_sync", "wandb"] if find_spec("wandb") else []
    with prepared_python(tmp_path_factory.mktemp("python"), modules, {}) as python:
        yield python


@pytest.fixture
def quick_processes(python_with_wandb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import wandb once for the processes of all tests. Skips where it is not installed."""
    pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    monkeypatch.setattr(sys, "executable", python_with_wandb)


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    settings = {"monitor.wandb": True, "monitor.wandb_mode": "offline", "storage.root": str(tmp_path), "name": "mine"}
    spec = recipe("smoke", settings)
    spec.run_folder.mkdir(parents=True)
    folders = {"run_folder": spec.run_folder, "shards_folder": tmp_path}
    return TrainJob(spec=spec, run_fingerprint="f" * 64, resume_tag=None, unique_id="0" * 32, **folders)


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


@pytest.mark.usefixtures("quick_processes")
def test_a_resume_continues_the_same_wandb_run_and_sends_each_step_once(job: TrainJob) -> None:
    attempt(job, 0, {step: {"loss": float(step), "mfu": None} for step in range(6)})
    attempt(job, 3, {step: {"loss": step + 0.5} for step in range(4, 8)})
    first, second = wandb_files.segments(job.run_folder)
    assert first.name == second.name == f"run-{SyncJob.of(job, 0).run_id}.wandb"
    assert losses(first) == {step: float(step) for step in range(6)}
    assert losses(second) == {6: 6.5, 7: 7.5}
    assert "mfu" not in wandb_files.history(first)[1]


def test_of_a_run_on_pairs_the_settings_of_rows_are_sent_and_not_the_files(job: TrainJob) -> None:
    spec = job.spec.with_settings({"pairs.train": ["/private/a.jsonl"], "pairs.target_tokens": 64})
    sent = SyncJob.of(job.model_copy(update={"spec": spec}), 0)
    assert sent.config["pairs"]["target_tokens"] == 64
    assert "objective" not in sent.config
    assert "private" not in json.dumps(sent.config)


@pytest.mark.usefixtures("quick_processes")
def test_training_that_begins_again_is_a_new_wandb_run_and_sends_also_what_was_not_sent(job: TrainJob) -> None:
    with Metrics(job.metrics_path, job.tensorboard_folder, 0) as metrics:
        metrics.write(1, {"loss": 1.0})
    attempt(job, 1, {2: {"loss": 2.0}})
    attempt(job, 0, {1: {"loss": 1.5}})
    first, second = wandb_files.segments(job.run_folder)
    assert second.stem == f"{first.stem}-2"
    assert losses(first) == {1: 1.0, 2: 2.0}
    assert losses(second) == {1: 1.5}


@pytest.mark.usefixtures("quick_processes")
def test_neither_the_api_key_nor_paths_and_hosts_are_sent_or_stored(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has processes import a wandb of this text."""

    def broken(text: str) -> None:
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken/wandb.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return broken


def test_a_wandb_that_fails_is_reported_once_and_training_continues(
    job: TrainJob, breaking: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    breaking(f"raise ImportError('no core for {SECRET}')\n")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    attempt(job, 0, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    logged = capfd.readouterr().err
    assert logged.count("W&B gets no more metrics of this attempt, training continues: no core for") == 1
    assert SECRET not in logged
    assert "[secret]" in logged


@contextmanager
def sync_process(job: TrainJob, **constants: float) -> Iterator[subprocess.Popen[str]]:
    """Start the process that sends metrics online, with other constants; the job has three lines of metrics."""
    with Metrics(job.metrics_path, job.tensorboard_folder, 0) as metrics:
        for step in range(3):
            metrics.write(step, {"loss": float(step)})
    assigned = "".join(f"w.{name} = {value}; " for name, value in constants.items())
    program = f"import sys; from t5train.train import wandb_sync as w; {assigned}sys.exit(w.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(online(job).model_dump_json() + "\n")
        process.stdin.flush()
        limit = Timer(HANG_SECONDS, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


def online(job: TrainJob) -> SyncJob:
    return SyncJob.of(job, 0).model_copy(update={"mode": "online"})


def read_until(process: subprocess.Popen[str], ending: str) -> str:
    lines = []
    for line in process.stderr:
        lines.append(line)
        if ending in line:
            break
    return "".join(lines)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make wandb use a server that answers every POST with one status."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int) -> None:
        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answers))
        Thread(target=servers[0].serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_API_KEY", SECRET)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{servers[0].server_port}")

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


@pytest.mark.usefixtures("quick_processes", "no_server")
def test_metrics_are_recorded_offline_if_training_ends_before_the_server_answers(job: TrainJob) -> None:
    with sync_process(job, _ANSWER_SECONDS=2) as process:
        _, logged = process.communicate()
    assert process.returncode == 0, logged
    (path,) = wandb_files.segments(job.run_folder)
    assert losses(path) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert logged.count("the W&B server cannot be used (") == 1
    assert f"To send them after training: wandb sync {path.parent}. If the run is resumed" in logged
    assert SECRET not in logged
    assert wandb_sync._Sent.read(online(job)).step == -1, "the next attempt sends all steps"


@pytest.mark.usefixtures("quick_processes", "no_server")
def test_metrics_are_recorded_offline_while_training_runs_after_three_failed_tries(job: TrainJob) -> None:
    of_the_user = job.run_folder / "wandb/run-20200101_000000-mine/files"
    of_the_user.mkdir(parents=True)
    with sync_process(job, _ANSWER_SECONDS=1, _RETRY_SECONDS=0.1) as process:
        logged = read_until(process, "wandb sync")
        assert "it is tried 3 times, every 0 s" in logged
        assert "cannot be used" not in logged.partition("it is tried 3 times")[2]
        await_that(lambda: wandb_files.segments(job.run_folder))
        assert process.poll() is None, "training still runs"
        _, rest = process.communicate()
    assert process.returncode == 0, rest
    found = wandb_files.segments(job.run_folder)
    assert losses(found[0]) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert f"wandb sync {found[0].parent}." in logged
    assert list(job.run_folder.glob("wandb/run-*/*")) == [of_the_user], "only what the failed tries made is removed"
    assert wandb_sync._Sent.read(online(job)).step == -1, "the next attempt sends all steps"


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_project_is_reported_at_once_and_the_metrics_are_recorded_offline(
    job: TrainJob, server: Callable[[int], None], status: int
) -> None:
    server(status)
    with sync_process(job) as process:
        logged = read_until(process, "wandb sync")
        _, rest = process.communicate()
    assert process.returncode == 0, rest
    assert re.search(
        rf"cannot be used \(.*error {status}.*\)\. Trying again would not help\. Training continues", logged
    )
    assert "every 300 s" not in logged + rest
    (path,) = wandb_files.segments(job.run_folder)
    assert losses(path) == {0: 0.0, 1: 1.0, 2: 2.0}


def test_what_wandb_itself_refuses_is_not_tried_again() -> None:
    errors = pytest.importorskip("wandb.errors", reason="the package wandb is not installed (make setup installs it)")
    refusals = [errors.AuthenticationError("invalid API key"), errors.UsageError("invalid project name")]
    assert all(map(wandb_sync._is_refusal, refusals))
    transient = ["returned error 408: timeout", "returned error 429: slow down", "returned error 503", "no route"]
    assert not any(wandb_sync._is_refusal(errors.CommError(text)) for text in transient)


def test_a_server_that_does_not_answer_is_tried_again_while_training_runs(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed (make setup installs it)")
    answers: list[Exception | str] = [wandb.Error("no route"), wandb.Error("no route"), "the run"]
    monkeypatch.setattr(wandb_sync, "_has_ended", lambda _seconds: False)

    def begin(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(wandb_sync, "_begin", begin)
    assert wandb_sync._online(online(job), wandb_sync._Sent.read(online(job))) == "the run"
    assert caplog.text.count("it is tried 3 times, every 300 s") == 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, TrainingError("the loss is nan")])
def test_a_wandb_that_hangs_neither_slows_training_nor_keeps_it_from_ending(
    job: TrainJob, breaking: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception | None,
) -> None:  # fmt: skip
    breaking("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(wandb_sync, "SECONDS_TO_END", 1.5)
    monkeypatch.setattr(wandb_sync, "SECONDS_AFTER_ERROR", 1.0)
    process = WandbProcess(SyncJob.of(job, 0))
    with Metrics(job.metrics_path, job.tensorboard_folder, 0) as metrics:
        began = time.monotonic()
        for step in range(1000):
            metrics.write(step, {"loss": 1.0})
        assert time.monotonic() - began < 100  # the program hangs for 600
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        process.__exit__(error and type(error), error, None)
    assert time.monotonic() - began < 100
    limit = 1.0 if error else 1.5
    assert f"W&B did not take the last metrics within {limit:.0f} s" in caplog.text

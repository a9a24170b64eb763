"""Sends the metrics of a run to Weights & Biases, in a process of its own beside rank 0.

::

    rank 0 ── writes metrics.jsonl ──> this process ── wandb ──> the W&B server, or the run's folder wandb

The process reads ``metrics.jsonl`` as it grows, so training never waits for it: not for the package to be imported,
nor for a server that does not answer. Such a server is tried again while training runs. After a few failed tries, or
at once if the server refuses the run, the metrics are written to the run's folder instead. The process ends when its
standard input does, which also happens when rank 0 is killed. What it fails to do is logged once, and training
continues.
"""

import logging
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from os import SEEK_CUR
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from pydantic import BaseModel, ConfigDict

from t5train.errors import Preempted
from t5train.files.atomic import write_json
from t5train.files.os_errors import in_one_line
from t5train.files.run_folder import WANDB, WANDB_SENT
from t5train.records.metrics import Values, parse_line
from t5train.spec.rank_job import TrainJob

SECONDS_TO_END, SECONDS_AFTER_ERROR = 30.0, 5.0
"""How long rank 0 waits at its end until W&B has everything."""
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS, _RETRY_SECONDS = 20.0, 300.0
"""How long the server may take to answer, less than rank 0 waits at its end, and how long until it is tried again."""
_TRIES = 3
"""After so many failed tries, the attempt is recorded offline, so that its metrics are on disk while it trains."""
_REFUSED = re.compile(r"returned error 4(?!08|29)\d\d")
"""How wandb words that the server answered, but not with a run: 401 for a wrong key, 404 for an unknown entity."""
_REPORTED = 3
"""Exit code of the process after it has logged what failed."""
_NICENESS = 10
_SYNC_LATER = "metrics.jsonl has all metrics; docs/how-to/monitoring.md says how to send them later"
_log = logging.getLogger(__name__)


class SyncJob(BaseModel):
    """What the process is to send, and where. Has no API key: wandb finds it in the environment or in ~/.netrc."""

    model_config = ConfigDict(frozen=True)
    metrics: Path
    run_folder: Path
    run_id: str
    """Id of the W&B run. Training that begins again at step 0 appends a number, because W&B takes each step once."""
    name: str
    project: str
    mode: Literal["online", "offline"]
    resume_step: int
    config: dict[str, Any]

    @classmethod
    def of(cls, job: TrainJob, resume_step: int) -> Self:
        """Return the job of a training attempt. The run's paths, hosts, and source of text or pairs are not sent."""
        spec = job.spec
        execution = {"layout": spec.layout.model_dump(mode="json"), "ranks": spec.cluster.ranks}
        return cls(
            metrics=job.metrics_path,
            run_folder=job.run_folder,
            run_id=sha256(f"{job.run_fingerprint} {job.unique_id}".encode()).hexdigest()[:16],
            name=spec.run_name,
            project=spec.monitor.wandb_project,
            mode=spec.monitor.wandb_mode,
            resume_step=resume_step,
            config={
                **spec.training_settings(),
                **execution,
                "recipe": spec.recipe,
                "run_fingerprint": job.run_fingerprint,
            },
        )


class WandbProcess:
    """The process, for rank 0; a context manager. Never raises: what fails is logged as a warning."""

    def __init__(self, job: SyncJob) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            command = [sys.executable, "-m", "t5train.train.wandb_sync"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            stdin = self._process.stdin
            if stdin is not None:
                stdin.write(job.model_dump_json().encode() + b"\n")
                stdin.flush()
        except OSError as error:
            _log.warning("W&B gets no metrics of this attempt: its process cannot be started: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        if self._process.stdin is not None:
            with suppress(OSError):  # the process has ended before
                self._process.stdin.close()
        seconds = SECONDS_TO_END if error is None or isinstance(error, Preempted) else SECONDS_AFTER_ERROR
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            _log.warning("W&B did not take the last metrics within %.0f s: %s", seconds, _SYNC_LATER)
            return
        if code not in (0, _REPORTED):
            _log.warning("the process that sends metrics to W&B ended with %d: %s", code, _SYNC_LATER)


def main() -> int:
    """Send metrics until standard input ends. Its first line is a SyncJob."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 may still have a checkpoint to save
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.nice(_NICENESS)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # otherwise wandb reports its own errors to its makers
    job = SyncJob.model_validate_json(sys.stdin.buffer.readline())
    try:
        _send(job)
    except Exception as error:
        _log.warning(
            "W&B gets no more metrics of this attempt, training continues: %s. %s",
            _redacted(in_one_line(error))[:300],
            _SYNC_LATER,
        )
        return _REPORTED
    return 0


def _redacted(text: str) -> str:
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "[secret]") if key else text


def _send(job: SyncJob) -> None:
    sent = _Sent.read(job)
    online = _online(job, sent) if job.mode == "online" else None
    with online or _begin(job, sent, "offline") as run:
        is_instead = online is None and job.mode == "online"
        if is_instead:
            folder = Path(run.dir).parent
            _log.warning(
                "the metrics of this attempt are recorded in %s. To send them after training: wandb sync %s. If the "
                "run is resumed and the server can be used then, they are sent without that command",
                folder,
                shlex.quote(str(folder)),
            )
        _follow(job, run, sent, is_noted=not is_instead)


def _online(job: SyncJob, sent: "_Sent") -> Any:
    """Return the W&B run on the server, or None if the metrics are to be recorded offline.

    That is if the server refuses the run or fails to answer ``_TRIES`` times, or if training ends before it answers.
    """
    import wandb

    for number in range(1, _TRIES + 1):
        before = _online_folders(job)
        try:
            return _begin(job, sent, "online")
        except wandb.Error as error:
            _clean_up(job, before)
            failure, is_refusal = _redacted(in_one_line(error))[:300], _is_refusal(error)
        if is_refusal:
            _log.warning("the W&B server cannot be used (%s). Trying again would not help. Training continues", failure)
            return None
        if number == 1:
            _log.warning(
                "the W&B server cannot be used (%s). Training continues, and it is tried %d times, every %.0f s",
                *(failure, _TRIES, _RETRY_SECONDS),
            )
        if number < _TRIES and _has_ended(_RETRY_SECONDS):
            return None
    return None


def _is_refusal(error: Exception) -> bool:
    """Return whether another try would fail in the same way: the key, the project or a setting is wrong."""
    from wandb.errors import AuthenticationError, UsageError

    return isinstance(error, (AuthenticationError, UsageError)) or _REFUSED.search(str(error)) is not None


def _online_folders(job: SyncJob) -> set[Path]:
    return set((job.run_folder / WANDB).glob("run-*"))


def _clean_up(job: SyncJob, before: set[Path]) -> None:
    """End wandb after a failed try, and remove the folder that the try made: it has no metrics."""
    import wandb

    wandb.teardown()  # otherwise the id of the run counts as in use
    for folder in _online_folders(job) - before:
        shutil.rmtree(folder, ignore_errors=True)


def _begin(job: SyncJob, sent: "_Sent", mode: Literal["online", "offline"]) -> Any:
    """Return the W&B run. Raises wandb.Error if the server does not answer, or refuses it."""
    import wandb

    # Only what this project logs: no console, code, git state, host, packages or measurements of the machine.
    own = wandb.Settings(
        console="off",
        silent=True,
        host="",
        symlink=False,
        disable_git=True,
        disable_code=True,
        save_code=False,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        init_timeout=_ANSWER_SECONDS,
    )
    return wandb.init(
        project=job.project,
        id=sent.run_id,
        name=job.name,
        dir=str(job.run_folder),
        mode=mode,
        resume="allow",
        config=job.config,
        settings=own,
    )


def _follow(job: SyncJob, run: Any, sent: "_Sent", is_noted: bool) -> None:
    """Log the metrics until training ends, and note the last step for the next attempt if ``is_noted``."""
    first_step, ended = max(sent.step + 1, run.step), False  # ``run.step`` is what the server expects next
    with open(job.metrics, "rb") as file:
        while not ended:
            ended = _has_ended(_LOOK_SECONDS)
            step = sent.step
            for line in _new_lines(file):
                step = int(line["step"] or 0)
                if step >= first_step:
                    values = {name: value for name, value in line.items() if name != "step" and value is not None}
                    run.log(values, step=step)
            if step > sent.step and is_noted:
                sent = sent.model_copy(update={"step": step})
                sent.write(job)


def _new_lines(file: BinaryIO) -> Iterator[Values]:
    """Yield the complete lines that were added since the last call; damaged ones are skipped."""
    while (line := file.readline()).endswith(b"\n"):
        if (values := parse_line(line)) is not None:
            yield values
    file.seek(-len(line), SEEK_CUR)


def _has_ended(seconds: float) -> bool:
    """Return whether training ends within this time: standard input is readable at its end."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


class _Sent(BaseModel):
    """The id of the W&B run, and the last step that it got."""

    base_id: str
    number: int = 1
    """How many times training has begun at step 0 after W&B had got steps."""
    step: int = -1

    @classmethod
    def read(cls, job: SyncJob) -> Self:
        """Return what earlier attempts have sent; with a new id if training begins at step 0."""
        found = cls(base_id=job.run_id)
        with suppress(OSError, ValueError):
            earlier = cls.model_validate_json((job.run_folder / WANDB_SENT).read_bytes())
            found = earlier if earlier.base_id == job.run_id else found
        if job.resume_step == 0 and found.step > 0:
            return cls(base_id=job.run_id, number=found.number + 1)
        return found

    @property
    def run_id(self) -> str:
        """The id of the W&B run."""
        return self.base_id if self.number == 1 else f"{self.base_id}-{self.number}"

    def write(self, job: SyncJob) -> None:
        """Store it for the next attempt."""
        (job.run_folder / WANDB).mkdir(exist_ok=True)
        write_json(job.run_folder / WANDB_SENT, self.model_dump())


if __name__ == "__main__":
    sys.exit(main())

"""The state of each run under a root, from the ends of a few files in its folder. Locks, changes and hashes nothing.

Imports neither torch nor Prefect, as ``status`` must answer at once.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from infra.head.launch.start_record import Ending, Start, read_start
from infra.node.attempts import attempt, run_lease, run_lock
from infra.node.processes import boot_id
from t5train.checkpoint import sidecar
from t5train.checkpoint.resume_point import is_asked_to_begin_again, is_unfinished, last_complete, tags_in
from t5train.errors import IncompleteCheckpoint, RecordError, T5TrainError
from t5train.files import heartbeat
from t5train.files.presence import ABSENT, is_folder, is_there, names_in, reading, visible_in
from t5train.files.run_folder import (
    ATTEMPTS,
    CHECKPOINTS,
    EXPORT,
    LAST_COMPLETE,
    LAST_START,
    METRICS,
    PUBLISHED,
    RUN,
    RUNS,
    WEIGHTS,
    step_of,
    tag_of,
)
from t5train.records.evaluation_metrics import EVALUATION_METRICS
from t5train.records.metrics import Values, last_metrics, recent_metrics
from t5train.records.stage_records import MANIFEST
from t5train.release.certificate import CERTIFICATE
from t5train.report.report_folder import FAILURE, report_path
from t5train.report.time_left import seconds_of_steps
from t5train.spec import EvaluateSpec

_THREADS = 32
_LEASE_MAY_LIVE_SECONDS = 300.0
"""Whether a process on another machine still holds a run takes seconds to find out. If its lease was last renewed
longer ago than this, it does not; clocks of machines that share a root must agree as closely."""
_STEPS = 50


class State(StrEnum):
    """What has become of a run."""

    NOT_BEGUN = "not begun"
    """It has a folder, but no command has trained it yet."""
    RUNNING = "running"
    """A process holds it."""
    FAILED = "failed"
    """The last command ended with an error."""
    INTERRUPTED = "interrupted"
    """By Ctrl-C or SIGTERM."""
    CANCELLED = "cancelled"
    """In Prefect."""
    CRASHED = "crashed"
    """The process that held it is gone without having said how it ended: it was killed, or the machine went down."""
    STOPPED = "stopped"
    """It was released, and how that command ended was not recorded, as by an earlier version."""
    TRAINED = "trained"
    """Trained to the last step, but not published."""
    PUBLISHED = "published"
    UNREADABLE = "unreadable"
    """A record of the run cannot be read."""


_BY_ENDING = {
    Ending.FAILED: State.FAILED,
    Ending.INTERRUPTED: State.INTERRUPTED,
    Ending.CANCELLED: State.CANCELLED,
}


@dataclass(frozen=True)
class RunState:
    """The state of one run. Times are in seconds; what is unknown is None."""

    name: str
    folder: Path
    state: State
    stage: str | None = None
    """What a running run is doing; the last finished stage of any other."""
    error: str | None = None
    """Of a failed run, or why the run is unreadable; the whole text."""
    step: int | None = None
    num_steps: int | None = None
    resumable_step: int | None = None
    """Step of the newest complete checkpoint."""
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    """Until the last step, while it trains."""
    seconds_since_activity: float | None = None
    holder: str | None = None
    """The process that holds it."""
    published: str | None = None
    """Where it was published last."""

    @property
    def has_ended_early(self) -> bool:
        """Whether training is done and ended before its last step (evaluate.patience)."""
        is_done = self.state != State.RUNNING and self.stage is not None
        return is_done and self.step is not None and self.num_steps is not None and self.step < self.num_steps


def run_states(root: Path) -> list[RunState]:
    """Return the states of all runs under a root, by name. Raises Unreadable if the runs cannot be listed."""
    folders = [folder for folder in visible_in(root / RUNS) if is_folder(folder)]
    with ThreadPoolExecutor(_THREADS) as threads:  # waiting for other machines and slow file systems, not computing
        return list(threads.map(run_state, folders))


def run_state(folder: Path) -> RunState:
    """Return the state of one run. If a record cannot be read, the state says so and why."""
    try:
        return _Reader(folder).state()
    except (T5TrainError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error) if isinstance(error, T5TrainError | OSError) else f"a record is damaged: {error!r}"
        return RunState(folder.name, folder, State.UNREADABLE, error=said)


def last_finished_stage(folder: Path) -> str | None:
    """Return the last finished stage of a run. Every stage writes a file when it is done.

    What follows training does not count while a run is trained again or beyond its end.
    """
    if not is_there(folder / MANIFEST):
        return None
    consolidated = [weights / MANIFEST for weights in visible_in(folder / WEIGHTS)]
    signs = {
        "published": [folder / PUBLISHED],
        "certified": [folder / EXPORT / CERTIFICATE],
        "evaluated": [folder / EXPORT / EVALUATION_METRICS],
        "exported": [folder / EXPORT / MANIFEST],
        "consolidated": consolidated,
    }
    return next((stage for stage, made in signs.items() if any(map(is_there, made))), "trained")


def resumable_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that was recorded as complete, or has all sidecars; None if none is."""
    if is_asked_to_begin_again(folder):
        return None
    last, checkpoints = last_complete(folder), folder / CHECKPOINTS
    for tag in tags_in(checkpoints):
        is_recorded = last is not None and tag <= last.tag
        if is_there(checkpoints / tag / "rank-00000.json") if is_recorded else not is_unfinished(checkpoints / tag):
            return step_of(tag)
    return None


def what_is_saved(folder: Path, num_steps: int) -> str:
    """Return, as a sentence, what a run continues from that was stopped."""
    step = resumable_step(folder)
    if step is None:
        return "no checkpoint was saved: finished stages are kept, and training begins at step 0"
    if step == num_steps or _ends_training(folder, step):
        return f"training is done, up to step {step:,}; the next start gathers its result"
    return f"training resumes after step {step:,}, from {folder / CHECKPOINTS / tag_of(step)}"


def _ends_training(folder: Path, step: int) -> bool:
    """Whether training ends early with the checkpoint of this step: no later one is trained."""
    evaluate = EvaluateSpec.model_validate(read_json(folder / RUN).get("spec", {}).get("evaluate", {}))
    try:
        best = sidecar.read(folder / CHECKPOINTS / tag_of(step), 0).best if evaluate.patience else None
    except IncompleteCheckpoint:
        return False
    return best is not None and evaluate.ends_training(best)


def holder(folder: Path) -> str | None:
    """As ``run_lock.holder``, which it only lets wait for a holder on another machine if that may be alive."""
    if (found := run_lock.holder_here(folder)) is not None:
        return found
    last = run_lease.read(folder)
    if last is None or not last.may_be_running_elsewhere:
        return None
    age = time.time() - (folder / run_lease.HOLDER).stat().st_mtime
    return run_lock.holder(folder) if abs(age) < _LEASE_MAY_LIVE_SECONDS else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file; empty if there is none. Raises Unreadable, and RecordError if it is damaged."""
    try:
        with reading(path):
            found = json.loads(path.read_bytes())
    except ABSENT:
        return {}
    except ValueError as error:
        raise RecordError(f"{path} is damaged ({error}). Restore the file") from error
    if not isinstance(found, dict):
        raise RecordError(f"{path} is damaged (it is not a JSON object). Restore the file")
    return found


@dataclass(frozen=True)
class _Reader:
    """Reads the state of one run."""

    folder: Path
    read_at: float = field(default_factory=time.time)

    def state(self) -> RunState:
        names_in(self.folder)  # raises Unreadable
        held_by, start = holder(self.folder), read_start(self.folder)
        if held_by is None and start is not None and start.ended_at is None:
            held_by, start = holder(self.folder), read_start(self.folder)  # it may just have been taken or released
        state, error = (State.RUNNING, None) if held_by else self._at_rest(start)
        last: Values = last_metrics(self.folder / METRICS) or {}
        found = RunState(
            name=self.folder.name,
            folder=self.folder,
            state=state,
            stage=last_finished_stage(self.folder),
            error=error,
            step=_whole(last.get("step")),
            num_steps=_num_steps(self.folder),
            resumable_step=resumable_step(self.folder),
            loss=last.get("loss"),
            tokens_per_second=last.get("tokens_per_second"),
            seconds_since_activity=self._idle_seconds(),
            holder=held_by,
            published=read_json(self.folder / PUBLISHED).get("url"),
        )
        return self._while_running(found, start) if state == State.RUNNING else found

    def _at_rest(self, start: Start | None) -> tuple[State, str | None]:
        """The state of a run that no process holds, and the error of a failed one."""
        is_trained = is_there(self.folder / MANIFEST)
        if is_trained and is_there(self.folder / PUBLISHED):
            return State.PUBLISHED, None
        if start is None:
            return self._of_earlier_version(is_trained)
        if start.ended_at is None:
            return State.CRASHED, None
        if start.how in _BY_ENDING:
            return _BY_ENDING[start.how], start.error
        return (State.TRAINED if is_trained else State.STOPPED), None

    def _of_earlier_version(self, is_trained: bool) -> tuple[State, str | None]:
        """The state of a run that was last held by a version that recorded only failures in flows."""
        lease = run_lease.read(self.folder)
        if lease is not None and not lease.is_released:
            return State.CRASHED, None
        if is_trained:
            return State.TRAINED, None
        if (cause := _reported_cause(self.folder)) is not None:
            return State.FAILED, cause
        return (State.STOPPED if is_there(self.folder / RUN) else State.NOT_BEGUN), None

    def _while_running(self, found: RunState, start: Start | None) -> RunState:
        """Add what a running run is doing. Figures from before its ranks started are left out."""
        begun = attempts_in(self.folder)[-1:]
        began_at = max((_changed_at(each / attempt.ATTEMPT) for each in begun), default=0.0)
        started_at = (
            datetime.fromisoformat(start.started_at).timestamp()
            if start is not None and start.ended_at is None
            else 0.0
        )
        trains = bool(begun) and began_at >= started_at
        is_current = trains and _changed_at(self.folder / METRICS) > began_at and not is_there(self.folder / MANIFEST)
        return replace(
            found,
            stage=self._doing(start, begun[0] if trains else None),
            tokens_per_second=found.tokens_per_second if is_current else None,
            seconds_left=self._seconds_left(found) if is_current else None,
        )

    def _seconds_left(self, found: RunState) -> float | None:
        lines = recent_metrics(self.folder / METRICS)
        seconds = [each for line in lines if (each := line.get("seconds")) is not None][-_STEPS:]
        if found.step is None or found.num_steps is None:
            return None
        return seconds_of_steps(seconds, found.step, found.num_steps)

    def _doing(self, start: Start | None, attempt_folder: Path | None) -> str:
        stage = start.stage if start is not None and start.ended_at is None else None
        is_training = attempt_folder is not None and not is_there(self.folder / MANIFEST)
        phase = _phase(attempt_folder) if attempt_folder is not None and is_training else None
        if stage is None:
            return phase or ("training" if is_training else "preparing")
        return f"{stage}: {phase}" if phase else stage

    def _idle_seconds(self) -> float | None:
        names = (METRICS, LAST_START, LAST_COMPLETE, PUBLISHED, MANIFEST, RUN, f"{EXPORT}/{MANIFEST}")
        newest = max(_changed_at(self.folder / name) for name in names) or _changed_at(self.folder)
        return max(0.0, self.read_at - newest)


def attempts_in(folder: Path) -> list[Path]:
    """Return the folders of a run's attempts, oldest first. Raises Unreadable."""
    return [folder / ATTEMPTS / name for name in names_in(folder / ATTEMPTS) if name.isdigit()]


def _phase(attempt_folder: Path) -> str | None:
    """What the first rank is doing, and for how long if that is unusual; None if it is unknown."""
    is_on_hosts = read_json(attempt_folder / attempt.ATTEMPT).get("hosts") is not None
    name = attempt.HEAD if is_on_hosts else attempt.rank_name(0)
    beat, now = heartbeat.read(heartbeat.beat_file(attempt_folder / name)), time.monotonic()
    lease = run_lease.read(attempt_folder.parent.parent)
    if (
        beat is None
        or lease is None
        or lease.boot_id != boot_id()
        or not 0 <= now - beat.beat < heartbeat.FRESH_SECONDS
    ):
        return None
    # A rank that exceeds its limit is being ended.
    is_slow = heartbeat.unusual_seconds(beat) <= (seconds := now - beat.since) <= beat.limit
    return heartbeat.PHASE_DESCRIPTIONS[beat.phase] + (f" for {seconds // 60:.0f} min" if is_slow else "")


def _num_steps(folder: Path) -> int | None:
    begun = read_json(folder / RUN)
    return _whole(begun["spec"]["optimizer"]["num_steps"]) if begun else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _reported_cause(folder: Path) -> str | None:
    """The cause in the report on a failure, if there is one."""
    path = report_path(folder, FAILURE)
    try:
        with reading(path):
            lines = path.read_text("utf-8", "replace").splitlines()
    except ABSENT:
        return None
    return next((line.removeprefix("**Why:** ") for line in lines if line.startswith("**Why:** ")), "unknown")


def _changed_at(path: Path) -> float:
    try:
        with reading(path):
            return path.stat().st_mtime
    except ABSENT:
        return 0.0

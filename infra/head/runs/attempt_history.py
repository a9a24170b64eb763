"""The attempts of a run: when each ran, between which steps, where, and how it ended, as its files say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.head.runs.run_state import attempts_in, read_json
from infra.node.attempts import attempt
from infra.node.attempts.attempt import LAUNCHER, Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.watchdog import STOP_REQUESTED
from t5train.errors import Preempted, T5TrainError
from t5train.files import error_report, heartbeat
from t5train.files.presence import names_in
from t5train.files.run_folder import ATTEMPT_SPEC, step_of

_PARTIAL_PHASES = {"step", "compile"}


@dataclass(frozen=True)
class AttemptSummary:
    """One start of a run's ranks."""

    number: int
    started_at: str | None
    ended_at: str | None
    """None while it runs, or if it was killed together with its guards."""
    from_step: int | None
    """Step of the checkpoint that it began from."""
    to_step: int | None
    """Last step that was completed."""
    ended: str
    """How it ended, in words."""
    hosts: tuple[str, ...]


def attempt_history(run_folder: Path, is_running: bool) -> list[AttemptSummary]:
    """Return the attempts of a run, oldest first. ``is_running`` says whether a process holds the run."""
    folders = attempts_in(run_folder)
    return [_summary(folder, is_running and folder == folders[-1]) for folder in folders]


def _summary(folder: Path, may_run: bool) -> AttemptSummary:
    try:
        this, job = attempt.read(folder), read_json(folder / ATTEMPT_SPEC)
        names = sorted({name.partition(".")[0] for name in names_in(folder) if name.startswith("rank-")})
        records = {name: this.exit_record(name) for name in names}
        hosts = tuple(this.hosts) if this.hosts else (this.host,)
        from_step = _from_step(job) if job else None
        ended, ended_at = _ended(this, records, may_run)
        to_step = _to_step(folder, names, from_step)
        return AttemptSummary(this.number, this.started_at, ended_at, from_step, to_step, ended, hosts)
    except (T5TrainError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return AttemptSummary(int(folder.name), None, None, None, None, f"unknown: its files are damaged ({error})", ())


def _from_step(job: dict[str, Any]) -> int:
    if (tag := job.get("resume_tag")) is not None:
        return step_of(tag)
    return int(job["consolidated"]["clock"]["step"]) if job.get("consolidated") else 0


def _to_step(folder: Path, names: list[str], from_step: int | None) -> int | None:
    beats = (heartbeat.read(heartbeat.beat_file(folder / name)) for name in names)
    done = [beat.step - (beat.phase in _PARTIAL_PHASES) for beat in beats if beat is not None and beat.step > 0]
    return max([*done, from_step or 0]) if done else from_step


def _ended(this: Attempt, records: dict[str, ExitRecord | None], may_run: bool) -> tuple[str, str | None]:
    """How the attempt ended, and when."""
    known = [record for record in records.values() if record is not None]
    if may_run and len(known) < len(records) | (not records):
        return "running", None
    ended_at = max((record.ended_at for record in known), default=None)
    return _how(this, records), ended_at


def _how(this: Attempt, records: dict[str, ExitRecord | None]) -> str:
    read = {name: error_report.read(this.rank_files(name)) for name in records}
    reported = {name: error for name, error in read.items() if error is not None}
    failed = next((error for error in reported.values() if not isinstance(error, Preempted)), None)
    if failed is not None:
        return str(failed).partition("\n")[0]
    if (killed := next((name for name, record in records.items() if record is None), None)) is not None:
        return f"{_rank(killed)} was killed together with its guard"
    known = [record for record in records.values() if record is not None]
    causes = [record for record in known if record.name not in reported and _is_cause(record)]
    first = min(causes, key=lambda record: record.ended_at, default=None)
    if first is not None:
        return f"{_rank(first.name)} {first}"
    if not records:
        return f"no rank started: the launcher {this.exit_record(LAUNCHER) or 'was killed'}"
    if reported or this.is_stop_ordered or any(_was_told(record) for record in known):
        return "stopped as requested"
    is_done = all(record.succeeded for record in known)
    return "trained to the last step" if is_done else f"{_rank(known[0].name)} {known[0]}"


def _was_told(record: ExitRecord) -> bool:
    return record.cause == Cause.REQUESTED and not record.succeeded


def _is_cause(record: ExitRecord) -> bool:
    """Whether a rank failed by itself; False if it was ended because something else had ended."""
    if record.cause == Cause.REQUESTED:
        return record.reason.startswith(f"{STOP_REQUESTED};")  # it did not stop in time
    return record.is_failure and record.cause not in {Cause.REFUSED, Cause.PARENT}


def _rank(name: str) -> str:
    return f"rank {int(name.removeprefix('rank-'))}"

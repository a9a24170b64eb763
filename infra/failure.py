"""Why an attempt failed: the one error to raise, from what its ranks and guards left behind."""

from pathlib import Path

from infra import attempt
from infra.attempt import Attempt, Cause, ExitRecord
from infra.log_lines import shown_lines
from t5train.errors import LaunchError, T5TrainError
from t5train.train import error_report

_TAIL_BYTES = 16 << 10
_TAIL_LINES = 20


def failure_of(this: Attempt, num_ranks: int) -> T5TrainError:
    """The error that a rank reported, else a LaunchError about the first rank that failed.

    Call it when every process of the attempt has ended.
    """
    for rank in range(num_ranks):
        if (reported := error_report.read(this.folder / attempt.rank_name(rank))) is not None:
            return reported
    what, name = _first_failure(this, num_ranks) or _launcher_failure(this)
    log = this.log(name)
    return LaunchError(f"{what} (attempt {this.folder.name}); its output is in {log}, and ends:\n{tail(log)}")


def _first_failure(this: Attempt, num_ranks: int) -> tuple[str, str] | None:
    """What happened, and to whom. A killed guard explains all that follows; else the earliest failure does.

    None when every rank was ended from outside, or none ever started: then the launcher is to blame.
    """
    records = {rank: this.exit_record(attempt.rank_name(rank)) for rank in range(num_ranks)}
    missing = [rank for rank, record in records.items() if record is None]
    if missing and len(missing) < num_ranks:
        return f"rank {missing[0]} of {num_ranks} left no exit record: its guard was killed or never started", (
            attempt.rank_name(missing[0])
        )
    failed = [(rank, record) for rank, record in records.items() if record is not None and _is_cause(record)]
    if not failed:
        return None
    rank, first = min(failed, key=lambda pair: pair[1].ended_at)
    return f"rank {rank} of {num_ranks} {first}", first.name


def _launcher_failure(this: Attempt) -> tuple[str, str]:
    record = this.exit_record(attempt.LAUNCHER)
    how = "left no exit record, its guard was killed," if record is None else str(record)
    return f"the launcher {how} before its ranks had done their work", attempt.LAUNCHER


def _is_cause(record: ExitRecord) -> bool:
    return record.cause == Cause.EXITED and not record.succeeded


def tail(log: Path) -> str:
    """The last lines of a log that have text."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = shown_lines(file.read())
    except FileNotFoundError:
        return "(there is no such file: the process never started)"
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (nothing)"

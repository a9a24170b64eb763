"""Why an attempt failed: the one error to raise, from what its ranks and guards left behind."""

import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TypeGuard

from infra.attempts import guard_failure
from infra.attempts.attempt import LAUNCHER, Attempt, rank_name
from infra.attempts.diagnosis import Diagnosis, diagnose
from infra.attempts.exit_record import Cause, ExitRecord
from infra.attempts.log_lines import shown_lines
from infra.attempts.vigil import TOLD_TO_SAVE
from infra.environment import redact
from t5train.errors import DiskFailed, DiskFull, LaunchError, Preempted, RankKilled, StorageError, T5TrainError
from t5train.os_errors import of_rank
from t5train.train import error_report

_TAIL_BYTES = 16 << 10
_TAIL_LINES = 20
_LINES_READ = 200


def failure_of(this: Attempt, num_ranks: int) -> T5TrainError:
    """The error that a rank reported, else a LaunchError of the class that fits the first rank that failed.

    Call it when every process of the attempt has ended, and what ranks left is in its folder.
    """
    read = {rank: error_report.read(this.rank_files(rank_name(rank))) for rank in range(num_ranks)}
    reported = {rank: error for rank, error in read.items() if error is not None}
    # That they did what they were told is the reason only if there is no other.
    for rank, error in (reported | _of_guards(this, num_ranks)).items():
        if not isinstance(error, Preempted):
            return _on_its_host(this, rank, num_ranks, error)
    if (found := _first_failure(this, num_ranks, reported.keys())) is None:
        return next(iter(reported.values()), None) or _launcher_failure(this, num_ranks)
    kind, what, log, hosts = found
    text = f"{what} (attempt {this.folder.name}); its output is in {log}, and ends:\n{redact(tail(log))}"
    return kind(text, hosts)


def _of_guards(this: Attempt, num_ranks: int) -> dict[int, T5TrainError]:
    """What guards said who could not write it down."""
    said = guard_failure.read(this.log(LAUNCHER))
    return {rank: said[rank_name(rank)] for rank in range(num_ranks) if rank_name(rank) in said}


def _on_its_host(this: Attempt, rank: int, num_ranks: int, error: T5TrainError) -> T5TrainError:
    """An error of a disk with the rank, its host and what to do without it; any other as it is."""
    if not isinstance(error, DiskFull | DiskFailed | StorageError):
        return error
    hosts = _host_of(this, rank)
    remedy = "".join(f"; or do without {host}: --exclude {host}" for host in hosts)
    return type(error)(f"{_who(this, rank, num_ranks, None)}: {error}{remedy}", hosts)


_Found = tuple[type[T5TrainError], str, Path, list[str]]


def _first_failure(this: Attempt, num_ranks: int, explained: Collection[int]) -> _Found | None:
    """What happened, whose output tells of it, and whose host is to blame, without the ranks that are ``explained``.

    A killed guard explains all that follows; else the first failure does that was no consequence of another. None when
    every rank was ended from above, or none ever started.
    """
    records = {rank: this.exit_record(rank_name(rank)) for rank in range(num_ranks) if rank not in explained}
    for rank, record in records.items():
        if record is None and (this.folder / f"{rank_name(rank)}.pid").exists():
            who = _who(this, rank, num_ranks, None)
            if (reason := _disk_failure(this.folder)) is not None:
                return type(reason), f"{who} could not write its exit record: {reason}", this.log(rank_name(rank)), []
            what = f"{who} left no exit record: its guard was killed"
            return RankKilled, what, this.log(rank_name(rank)), _host_of(this, rank)
    failed = [
        (_diagnosis(this, record), record, rank)
        for rank, record in records.items()
        if _is_cause(record, this.hosts is not None)
    ]
    if not failed:
        return None
    diagnosis, record, rank = min(failed, key=lambda one: (one[0].hops, one[1].ended_at))
    what = f"{_who(this, rank, num_ranks, record)} {record}"
    blamed = _host_of(this, rank) if diagnosis.hops == 0 else []  # else it is another's fault, and not known whose
    return diagnosis.kind, f"{what}: {diagnosis.advice}" if diagnosis.advice else what, this.log(record.name), blamed


def _disk_failure(folder: Path) -> T5TrainError | None:
    """Why nothing can be written to a folder; None if something can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return of_rank(error)
    return None


def _diagnosis(this: Attempt, record: ExitRecord) -> Diagnosis:
    return diagnose(record, tail(this.log(record.name), _LINES_READ))


def _who(this: Attempt, rank: int, num_ranks: int, record: ExitRecord | None) -> str:
    """``rank 3 of 4 on node2``; the host only where there are several."""
    if this.hosts is None:
        return f"rank {rank} of {num_ranks}"
    return f"rank {rank} of {num_ranks} on {record.host if record else ''.join(_host_of(this, rank))}"


def _host_of(this: Attempt, rank: int) -> list[str]:
    """Its name; nothing in an attempt on this machine alone."""
    return [host for host, slots in (this.hosts or {}).items() for _ in slots][rank : rank + 1]


def _launcher_failure(this: Attempt, num_ranks: int) -> LaunchError:
    record = this.exit_record(LAUNCHER)
    how = "left no exit record, its guard was killed," if record is None else str(record)
    absent = [rank for rank in range(num_ranks) if not (this.folder / f"{rank_name(rank)}.pid").exists()]
    which = "" if not absent else f"; {_who(this, absent[0], num_ranks, None)} never started"
    log = this.log(LAUNCHER)
    return LaunchError(
        f"the launcher {how} before its ranks had done their work{which} (attempt {this.folder.name}); its output is "
        f"in {log}, and ends:\n{redact(tail(log))}"
    )


def _is_cause(record: ExitRecord | None, is_over_hosts: bool) -> TypeGuard[ExitRecord]:
    """Whether a rank failed, or had not saved when its time was over; not whether it was ended because of another."""
    if record is None or record.succeeded:
        return False
    if record.cause == Cause.TOLD:
        return record.reason.startswith(TOLD_TO_SAVE)
    # On one machine, the launcher that died has a record of its own that says more.
    return record.cause != Cause.REFUSED and (record.cause != Cause.PARENT or is_over_hosts)


def tail(log: Path, lines_kept: int = _TAIL_LINES) -> str:
    """The last lines of a log that have text."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = shown_lines(file.read())
    except FileNotFoundError:
        return "(there is no such file: the process never started)"
    return "\n".join(f"  {line}" for line in lines[-lines_kept:]) or "  (nothing)"

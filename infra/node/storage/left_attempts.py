"""Folders of attempts that were left on this machine and are no longer needed. Standard library only.

A head removes the folder of an attempt from its hosts once it has collected the files, so a folder that it could not
collect remains. ``heads/{run_id}`` on the head's machine is kept as long as part of the attempt may be left on a host.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.node import processes
from infra.node.attempts import attempt, head_lease, run_lock
from infra.node.attempts.attempt_actions import of_attempt
from infra.node.attempts.run_ownership import is_held_at
from t5train.files.run_folder import ATTEMPT_SPEC

_OLD_DAYS = 7
_OF_THIS_HEAD = "left by an attempt that has ended, and not collected by its head"
_OF_ANOTHER = f"left by another head's attempt that has ended, unchanged for {_OLD_DAYS} days"
_HALF_REMOVED = "left by an interrupted removal"


@dataclass(frozen=True)
class KnownAttempts:
    """Run ids of the attempts of all runs under a head's root."""

    idle: tuple[str, ...] = ()
    """Attempts of runs that are not in use."""
    busy: tuple[str, ...] = ()
    """Attempts of all other runs."""


def left_attempts(parent: Path, known: KnownAttempts) -> Iterator[tuple[Path, str]]:
    """Folders within ``parent`` that are no longer needed, and the reason of each."""
    for folder in sorted(parent.iterdir()):
        if folder.name.startswith("."):
            yield folder, _HALF_REMOVED
        elif folder.name in known.busy or _is_living(folder):
            continue
        elif folder.name in known.idle:
            yield folder, _OF_THIS_HEAD
        elif _days_unchanged(folder) > _OLD_DAYS and not _is_run_active(folder):
            yield folder, _OF_ANOTHER


def _is_living(folder: Path) -> bool:
    """Whether processes of the attempt run here, its head still renews the lease, or it is just being prepared."""
    ours, launcher = of_attempt(folder), processes.in_run(attempt.launcher_run_id(folder.name))
    if processes.find(lambda pid: ours(pid) or launcher(pid)):
        return True
    try:
        this = attempt.read(folder)
    except FileNotFoundError:
        return _days_unchanged(folder) < 1
    return head_lease.age_seconds(folder) <= (this.lease_seconds or 0) + this.grace_seconds


def _is_run_active(folder: Path) -> bool:
    """Whether a head is using the attempt's run, if this machine can see that."""
    try:
        job = json.loads((folder / ATTEMPT_SPEC).read_text("utf-8"))
    except FileNotFoundError:
        return False
    run_folder = Path(job["run_folder"])
    if job.get("node_local"):
        return is_held_at(run_folder)
    return run_folder.is_dir() and run_lock.holder(run_folder) is not None


def _days_unchanged(folder: Path) -> float:
    newest = folder.stat().st_mtime
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                newest = max(newest, Path(parent, name).lstat().st_mtime)
    return (time.time() - newest) / 86400

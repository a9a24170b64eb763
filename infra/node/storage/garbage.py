"""Finds and removes what no run needs on a node, including code that heads have sent.

If in doubt, nothing is removed: a run that the requesting head does not know may belong to another head. Code counts as
used as long as the files of an attempt with that code are here, or a process runs it. Code that was requested within
the last hour may be about to be used, and is kept too. Standard library only, as nodes import it.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.node import processes
from infra.node.attempts import attempt
from infra.node.attempts.run_ownership import is_held_at, owner_of
from infra.node.messages import Query
from infra.node.node_folders import (
    ATTEMPTS,
    CODE,
    SHARDS,
    STAGED,
    attempts_folder,
    node_folder,
    node_path,
    run_path,
    scratch_folder,
    within,
)
from infra.node.storage.disk_usage import is_run_active, remove_unused, staged_paths, users
from infra.node.storage.left_attempts import KnownAttempts, left_attempts
from t5train.files.atomic import discard
from t5train.files.locks import try_lock
from t5train.files.presence import visible_in
from t5train.files.run_folder import CHECKPOINTS, RUNS, SET_ASIDE

_KEPT_SECONDS = 3600.0
_LOCK_WAIT_SECONDS = 10.0


def unused_code() -> Iterator[Path]:
    """Folders of code that is not in use, and leftovers of interrupted transfers and removals of code."""
    if not node_path(CODE).is_dir():
        return
    kept = {attempt.read(path.parent).code for path in attempts_folder().glob(f"*/{attempt.ATTEMPT}")}
    for folder in sorted(node_path(CODE).iterdir()):
        if folder.name not in kept and _is_old(folder) and not processes.find(_runs_from(folder)):
            yield folder


def remove_code(folder: Path) -> bool:
    """Remove a folder of unused code, unless it is in use by now; returns whether it was removed."""
    with _locked(folder.parent) as is_locked:
        if not is_locked or folder not in unused_code():
            return False
        discard(folder)
        return True


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.lstat().st_mtime > _KEPT_SECONDS
    except FileNotFoundError:  # a partial folder that another process has renamed since
        return False


def _runs_from(folder: Path) -> processes.Belongs:
    return lambda pid: str(folder) in processes.variable(pid, "PYTHONPATH").split(os.pathsep)


@contextmanager
def _locked(code: Path) -> Iterator[bool]:
    """Exclude heads that are about to use code; yields whether the lock was obtained in time."""
    descriptor = os.open(code, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield try_lock(descriptor, _LOCK_WAIT_SECONDS)
    finally:
        os.close(descriptor)


KEPT_ASIDE = "kept: damaged or given up, and moved aside; remove it yourself once you no longer need it"


@dataclass(frozen=True)
class Garbage:
    """A folder that no run needs: its relative path and its size in bytes.

    The path is relative to the node folder for sent code and folders of attempts. All others are relative to the
    scratch folder, and on the head to the root.
    """

    relative_path: str
    size: int
    why: str
    is_kept: bool = False
    """Whether it is only listed and never removed; ``why`` then says why."""


@dataclass(frozen=True)
class Finished:
    """A finished run of the head."""

    unique_id: str | None
    """None for a run of an earlier version."""
    fault: str
    """What is wrong with the head's copy, so that nodes must keep their files of the run; empty if nothing is."""


@dataclass(frozen=True)
class HeadRuns:
    """What the head knows of its runs: the finished ones by their names on nodes, and the attempts of all runs."""

    finished: Mapping[str, Finished]
    attempts: KnownAttempts


@dataclass(frozen=True)
class FoundGarbage:
    """What no run needs on a node."""

    found: tuple[Garbage, ...]


@dataclass(frozen=True)
class FindGarbage(Query[FoundGarbage]):
    """List what no run needs."""

    action = "garbage"
    scratch: Path | None
    known: HeadRuns


def garbage(request: FindGarbage) -> FoundGarbage:
    """List what no run needs on this node."""
    return FoundGarbage(tuple(_found(scratch_folder(request.scratch), request.known)))


@dataclass(frozen=True)
class Freed:
    """The folders that were removed."""

    relative_paths: tuple[str, ...]


@dataclass(frozen=True)
class FreeGarbage(Query[Freed]):
    """Remove folders that were listed as garbage."""

    action = "free"
    scratch: Path | None
    known: HeadRuns
    relative_paths: tuple[str, ...]


def free(request: FreeGarbage) -> Freed:
    """Remove the requested folders, except those that are in use by now."""
    scratch = scratch_folder(request.scratch)
    found = [
        each
        for each in _found(scratch, request.known)
        if each.relative_path in request.relative_paths and not each.is_kept
    ]
    return Freed(tuple(each.relative_path for each in found if _remove(scratch, each.relative_path)))


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; files that are removed in the meantime do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


def _found(scratch: Path, known: HeadRuns) -> Iterator[Garbage]:
    for relative_path in staged_paths(scratch):
        if not users(scratch, relative_path):
            yield Garbage(relative_path, size_of(within(scratch, relative_path)), "staged, and not used by any run")
    for folder in sorted((scratch / RUNS).glob("[!.]*")):
        if folder.name in known.finished and not is_run_active(folder.name):
            yield from _of_run(folder, known.finished[folder.name])
    for folder in visible_in(scratch / SET_ASIDE):
        yield Garbage(str(folder.relative_to(scratch)), size_of(folder), KEPT_ASIDE, is_kept=True)
    for folder, why in left_attempts(attempts_folder(), known.attempts):
        yield Garbage(f"{ATTEMPTS}/{folder.name}", size_of(folder), why)
    for folder in unused_code():
        yield Garbage(f"{CODE}/{folder.name}", size_of(folder), "code that was sent, and is not used by any attempt")
    for parent in (SHARDS, STAGED, RUNS, f"{RUNS}/*/{CHECKPOINTS}"):
        for folder in sorted(scratch.glob(f"{parent}/.*.discarded")):
            yield Garbage(str(folder.relative_to(scratch)), size_of(folder), "left by an interrupted removal")


def _of_run(folder: Path, finished: Finished) -> Iterator[Garbage]:
    """What this node has of a run that the head has finished; nothing if it is another head's run of that name."""
    owner, relative_path, size = owner_of(folder), run_path(folder.name), size_of(folder)
    if owner is None:
        why = (
            "kept: no head has claimed it, because an earlier version wrote it; remove it yourself unless another root "
            "needs it"
        )
        yield Garbage(relative_path, size, why, is_kept=True)
    elif owner.unique_id != finished.unique_id or is_held_at(folder):
        return
    elif finished.fault:
        why = f"kept: the run is finished, but the head's copy is not intact: {finished.fault}"
        yield Garbage(relative_path, size, why, is_kept=True)
    else:
        yield Garbage(relative_path, size, "the head has the finished run")


def _remove(scratch: Path, relative_path: str) -> bool:
    if relative_path.startswith(f"{CODE}/"):
        return remove_code(within(node_folder(), relative_path))
    if relative_path.startswith(f"{ATTEMPTS}/"):
        discard(within(node_folder(), relative_path))
        return True
    if relative_path in staged_paths(scratch):
        return remove_unused(scratch, relative_path)
    discard(within(scratch, relative_path))
    return True

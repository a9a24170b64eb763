"""Which run owns the files in ``{scratch}/runs/{name}`` of this node. Standard library only, as nodes import it.

Two heads with different roots may train runs with the same name and settings. Such runs have the same name on nodes,
and therefore the same folder. Its ``owner.json`` names the run that the files belong to, and its ``lease`` contains
this machine's clock at the last message of that run's head. When the lease expires, the owner remains, but another head
may adopt the run.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path, PurePosixPath

from infra.node.attempts import attempt, head_lease
from infra.node.messages import Done, Query
from infra.node.node_folders import attempts_folder, run_path, scratch_folder, within
from t5train.errors import RunOwned, StorageError
from t5train.files.atomic import write_json
from t5train.files.locks import try_lock
from t5train.files.run_folder import ATTEMPT_SPEC, RUNS

OWNER = "owner.json"
_LOCK_WAIT_SECONDS = 10.0


class Mode(StrEnum):
    """What a head wants to do with a run on a node."""

    LOOK = "look"
    """Only report who owns it."""
    CLAIM = "claim"
    """Take the run if it has no owner; renew the lease if the head already owns it."""
    ADOPT = "adopt"
    """Like CLAIM, but also take the run from another head whose lease has expired."""


@dataclass(frozen=True)
class Owner:
    """The run that files on nodes belong to, and its head."""

    unique_id: str
    """Generated when the run was started for the first time."""
    head: str
    """Name of the head's machine."""
    root: str
    since: str
    lease_seconds: float

    def __str__(self) -> str:
        return f"head {self.head}, root {self.root}, since {attempt.shown_time(self.since)}"


@dataclass(frozen=True)
class NodeStore:
    """The files of a run on a node: the scratch folder (None: the default), and the run's unique id, if any."""

    scratch: Path | None
    owner: str | None


@dataclass(frozen=True)
class Claimed:
    """Who owns a run on a node."""

    is_ours: bool
    owner: Owner | None
    """The owner before the claim; None if it had none."""
    left_seconds: float
    """How long the lease of that owner still lasts."""


@dataclass(frozen=True)
class ClaimRun(Query[Claimed]):
    """Claim a run on a node."""

    action = "claim"
    scratch: Path | None
    run_name: str
    claimant: Owner
    mode: Mode


def claim(request: ClaimRun) -> Claimed:
    """Claim the run for the claimant, if the mode allows it."""
    folder, asked = _run_folder(request), request.claimant
    if request.mode == Mode.LOOK and not folder.exists():
        return Claimed(is_ours=False, owner=None, left_seconds=0.0)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        found = owner_of(folder)
        if found is not None and _is_of_same_head(found, asked) and request.mode != Mode.LOOK:
            head_lease.begin(folder)  # at once: every two seconds, and damaged files of another attempt do not matter
            return Claimed(is_ours=True, owner=found, left_seconds=found.lease_seconds)
        left = 0.0 if found is None else _left_seconds(folder, found)
        is_ours = _may_take(found, asked, left, request.mode)
        if is_ours and request.mode != Mode.LOOK:
            write_json(folder / OWNER, asdict(asked))
            head_lease.begin(folder)
    return Claimed(is_ours, found, left)


@dataclass(frozen=True)
class DisownRun(Query[Done]):
    """Undo a claim that was just made, because another node refused the same claim."""

    action = "disown"
    scratch: Path | None
    run_name: str
    claimant: Owner


def disown(request: DisownRun) -> Done:
    """Undo the claim, if the claimant still owns the run."""
    folder = _run_folder(request)
    with _locked(folder):
        if owner_of(folder) == request.claimant:
            (folder / OWNER).unlink()
            (folder / head_lease.LEASE).unlink(missing_ok=True)
    return Done()


def require_owner(scratch: Path, relative_path: str, unique_id: str | None) -> None:
    """Raise RunOwned if ``relative_path`` in the scratch folder belongs to a run other than the one with that id."""
    parts = PurePosixPath(relative_path).parts
    if parts[:1] == (RUNS,) and len(parts) > 1:
        require_owner_of(within(scratch, run_path(parts[1])), unique_id)


def require_owner_of(folder: Path, unique_id: str | None) -> None:
    """Raise RunOwned if the folder of a run on this node belongs to a run other than the one with that id."""
    found = owner_of(folder)
    if found is not None and found.unique_id != unique_id:
        raise RunOwned(f"{folder} belongs to {found}. Start the run under another --name")


def release(scratch: Path, run_name: str) -> None:
    """Release a run that the head no longer needs on this node, so that another head can adopt it at once."""
    (within(scratch, run_path(run_name)) / head_lease.LEASE).unlink(missing_ok=True)


def is_held(scratch: Path, run_name: str) -> bool:
    """Whether the head of a run has renewed its lease in time, or ranks of the run are running here."""
    return is_held_at(within(scratch, run_path(run_name)))


def is_held_at(folder: Path) -> bool:
    """The same as ``is_held``, for the folder of a run on this node."""
    found = owner_of(folder)
    return found is not None and _left_seconds(folder, found) > 0


def owner_of(folder: Path) -> Owner | None:
    """Read the owner of a run's folder on this node; None if it has none, as in an earlier version."""
    path = folder / OWNER
    try:
        facts = json.loads(path.read_text("utf-8"))
        return Owner(**{one.name: facts[one.name] for one in fields(Owner)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}), so the owner of this run is unknown. Repair the disk. If the file "
            "is damaged, make sure that no other head trains this run, then remove the file: the next head owns the run"
        ) from error


def _may_take(found: Owner | None, asked: Owner, left_seconds: float, mode: Mode) -> bool:
    if found is None:
        return True
    if found.unique_id == asked.unique_id:  # another head has the same id if the root was copied
        return _is_of_same_head(found, asked) or left_seconds <= 0
    return mode == Mode.ADOPT and left_seconds <= 0


def _is_of_same_head(found: Owner, asked: Owner) -> bool:
    return (found.unique_id, found.head, found.root) == (asked.unique_id, asked.head, asked.root)


def _left_seconds(folder: Path, found: Owner) -> float:
    left = max(0.0, found.lease_seconds - head_lease.age_seconds(folder))
    return max(left, found.lease_seconds) if _has_running_ranks(folder) else left


def _has_running_ranks(folder: Path) -> bool:
    """Whether ranks that write to this folder are alive, even if their head is not."""
    return any(_writes_into(folder, spec) for spec in attempts_folder().glob(f"*/{ATTEMPT_SPEC}"))


def _writes_into(folder: Path, spec: Path) -> bool:
    try:
        job = json.loads(spec.read_text("utf-8"))
        if not job.get("node_local") or Path(job["run_folder"]).resolve() != folder.resolve():
            return False
        this = attempt.read(spec.parent)
        # Before its guards exist, the attempt's own lease shows that ranks are about to start.
        return bool(this.guards()) or head_lease.age_seconds(spec.parent) <= (this.lease_seconds or 0)
    except FileNotFoundError:  # the attempt is just being prepared or removed
        return False


def _run_folder(request: ClaimRun | DisownRun) -> Path:
    return within(scratch_folder(request.scratch), run_path(request.run_name))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Admit one head at a time. A file lock is enough, because the scratch folder is on this machine's own disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor, _LOCK_WAIT_SECONDS):
            raise StorageError(
                f"{folder} has been locked by another process for {_LOCK_WAIT_SECONDS:.0f} s. Start again"
            )
        yield
    finally:
        os.close(descriptor)

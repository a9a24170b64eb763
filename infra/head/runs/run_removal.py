"""Deletes a run: its folder here, its copies on hosts and, if asked to, the folder that it was published to.

First, its folder is renamed to a hidden name, so that it is either a run or none: ``.{name}.removing`` until the copies
on hosts are gone, and ``.{name}.discarded`` from then on. If the deletion is interrupted, the same command finishes it;
``gc`` finishes the second part, too.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.head.hosts.node_client import Nodes
from infra.head.launch.earlier_attempts import end_earlier
from infra.head.runs.removal_plan import RemovalPlan, require_answers
from infra.head.storage.garbage_collection import free_of_heads, free_on
from infra.node.attempts.run_lock import run_lock
from t5train.errors import RunLocked, StorageError
from t5train.files.atomic import discard, remove_folder, sync_folder
from t5train.files.locks import flock
from t5train.files.os_errors import explain
from t5train.files.presence import is_there
from t5train.files.run_folder import RUNS, discarded, removing


def remove_run(plan: RemovalPlan, nodes: Nodes) -> None:
    """Delete a run as planned.

    Raises RunLocked if a process has taken the run since it was planned; nothing is deleted then. Raises HostError if a
    host fails meanwhile: the run no longer exists then, and repeating the command deletes what is left.
    """
    with _taken(plan) as hidden:
        if hidden != discarded(plan.run):
            _free_on_hosts(plan, hidden, nodes)
            if plan.published is not None:
                discard(plan.published)
        last = hidden if hidden == discarded(plan.run) else _renamed(hidden, discarded(plan.run))
        free_of_heads(plan.attempts, plan.of_head)
        try:
            remove_folder(last)
        except OSError as error:
            raise StorageError(f"{last} cannot be removed: {explain(error)}. Or remove it yourself") from error


@contextmanager
def _taken(plan: RemovalPlan) -> Iterator[Path]:
    """Hold the run, and yield the hidden folder where its files are from now on."""
    if plan.is_interrupted:
        with _locked(plan.folder):
            yield plan.folder
        return
    has_more = bool(plan.on_hosts) or plan.published is not None
    with run_lock(plan.run, wait_seconds=0) as lease:
        lease.release()  # its record moves with the folder
        yield _renamed(plan.run, removing(plan.run) if has_more else discarded(plan.run))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude a second command that finishes the same deletion."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RunLocked(f"{folder} is being deleted by another process. Wait for that process to end") from None
    finally:
        os.close(descriptor)


def _renamed(folder: Path, hidden: Path) -> Path:
    try:
        if is_there(hidden):  # of an earlier run of this name
            remove_folder(hidden)
        folder.rename(hidden)
        sync_folder(hidden.parent)
    except OSError as error:
        raise StorageError(f"{folder} cannot be renamed to {hidden}: {explain(error)}") from error
    return hidden


def _free_on_hosts(plan: RemovalPlan, hidden: Path, nodes: Nodes) -> None:
    if not nodes.hosts:
        return
    end_earlier(hidden, nodes.transport, on_tick=lambda: None)
    deleted_here = f"run {plan.run.name!r} is deleted here, but not yet on all hosts"
    freed = require_answers(deleted_here, free_on(nodes, [plan.on_nodes], plan.attempts, plan.on_hosts))
    for host, found in plan.on_hosts.items():
        asked = {each.relative_path for each in found if not each.is_kept and each.relative_path.startswith(RUNS)}
        if left := asked - {*freed[host]}:  # folders of attempts are gone already, if end_earlier has ended these
            raise RunLocked(
                f"{deleted_here}: {host} keeps {', '.join(left)}, which is in use by now. Repeat the command when that "
                "has ended"
            )

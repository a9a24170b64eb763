"""Deletes a run: its folder here, its copies on hosts and, if asked to, the folder that it was published to.

A plan, which deletes nothing, says what would be deleted, and whether anything is in the way.

First, the run's folder is renamed to a hidden name, so that it is either a run or none: ``.{name}.removing`` until the
copies on hosts are gone, and ``.{name}.discarded`` from then on. If the deletion is interrupted, the same command
finishes it; ``gc`` finishes the second part, too.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from infra.head.hosts.hostfile import chosen_hosts
from infra.head.hosts.nodes import Nodes
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.earlier_attempts import end_earlier, unended
from infra.head.runs.run_lookup import find_run, folder_of_run, root_of_run
from infra.head.runs.run_state import attempts_in, read_json
from infra.head.storage.checkpoint_record import former_hosts, not_begun_again
from infra.head.storage.garbage_collection import FinishedRun, free_of_heads, free_on, garbage_of_heads, garbage_on
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import living_processes, now
from infra.node.attempts.run_lease import in_use
from infra.node.attempts.run_lock import holder, run_lock
from infra.node.attempts.run_ownership import ClaimRun, Mode, Owner
from infra.node.node_folders import ATTEMPTS, name_on_nodes, run_path
from infra.node.storage.garbage import Garbage, size_of
from infra.node.storage.left_attempts import KnownAttempts
from t5train.errors import HostError, InputError, RunLocked, SpecError, StorageError
from t5train.files.atomic import discard, remove_folder, sync_folder
from t5train.files.locks import flock
from t5train.files.os_errors import explain as explain_os_error
from t5train.files.presence import files_below, is_folder, is_there, visible_in
from t5train.files.run_folder import PUBLISHED, RUN, RUNS, discarded, removing
from t5train.records.locations import local_folder
from t5train.records.stage_records import MANIFEST
from t5train.release.publication import publication_at
from t5train.spec import MachinesSpec
from t5train.spec.settings import explain

_DEADLINE_SECONDS = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class RemovalPlan:
    """What is deleted with a run."""

    run: Path
    """Folder of the run, under its own name."""
    folder: Path
    """Where the files of the run are now: a hidden folder if an earlier deletion was interrupted."""
    size_bytes: int
    on_hosts: Mapping[str, Sequence[Garbage]]
    """What hosts have of the run; empty if it never used hosts. Some of it may be kept, with a reason."""
    of_head: Sequence[Garbage]
    """What its launchers left on this machine."""
    on_nodes: FinishedRun
    """The run as hosts know it, whose files there may be deleted."""
    attempts: KnownAttempts
    published: Path | None
    """The published folder, if it is to be deleted, too."""

    @property
    def is_interrupted(self) -> bool:
        """Whether an earlier deletion was interrupted."""
        return self.folder != self.run


def removable_run(root: Path, named: str) -> tuple[Path, Path]:
    """Return the path of a run, and the folder where its files are now. Raises InputError if there is no such run.

    The folder differs from the path if an earlier deletion of the run was interrupted.
    """
    run = folder_of_run(root, named)
    if is_folder(removing(run)):
        return run, removing(run)
    if not is_folder(run) and is_folder(discarded(run)):
        return run, discarded(run)
    found = find_run(root, named)
    if found.is_symlink():
        raise InputError(f"{found} is a link. Delete the link, or name the path that it leads to ({found.readlink()})")
    return run, found


def machines_of_run(folder: Path, hostfile: Path | None) -> MachinesSpec:
    """Return how a run reached its hosts, with another hostfile if one is given. Raises SpecError."""
    spec = read_json(folder / RUN).get("spec", {})
    cluster = dict(spec.get("cluster", {}))
    if hostfile is not None:
        every_host = {"include": None, "exclude": None, "num_nodes": None, "spares": 0}
        cluster |= {"hostfile": str(hostfile.absolute()), **every_host}
    try:
        return MachinesSpec.model_validate({"storage": spec.get("storage", {}), "cluster": cluster})
    except ValidationError as error:
        raise SpecError(f"{folder / RUN} has settings that this version does not know: {explain(error)}") from None


def hosts_of_run(folder: Path, machines: MachinesSpec, without: Sequence[str] = ()) -> list[str]:
    """Return the hosts that may have files of a run: all that it ever used, and those of its hostfile."""
    begun = [each for each in attempts_in(folder) if (each / attempt.ATTEMPT).exists()]
    of_attempts = (attempt.read(each).hosts or {} for each in begun)
    names = [host for hosts in of_attempts for host in hosts]
    names += [*former_hosts(folder), *sorted(not_begun_again(folder))]
    if machines.cluster.hostfile is not None and (not names or machines.cluster.hostfile.exists()):
        names += chosen_hosts(machines.cluster).names
    return [host for host in dict.fromkeys(names) if host not in without]


def plan_removal(
    run: Path, folder: Path, nodes: Nodes, lacking: Mapping[str, HostError], *, with_published: bool
) -> RemovalPlan:
    """Return what is deleted with a run.

    Raises RunLocked if it is in use here or on a host, InputError if another run starts from it or if its published
    folder cannot be deleted, and the HostError of a host that cannot be asked.
    """
    _require_idle(folder)
    published = _published_folder(folder) if with_published else None
    for other, start in _dependents(run, [run, folder, *([published] if published else [])]):
        raise InputError(
            f"run {other!r} starts from {start} (its model.start_from). Delete {other!r} first, or copy that folder to "
            f"another place and start {other!r} again from there"
        )
    ids = tuple(attempt.read(each).run_id for each in attempts_in(folder) if (each / attempt.ATTEMPT).exists())
    begun = read_json(folder / RUN)
    known_name = name_on_nodes(run.name, str(begun.get("fingerprint", "")))
    attempts, on_nodes = KnownAttempts(idle=ids), FinishedRun(folder, known_name, begun.get("unique_id"))
    return RemovalPlan(
        run=run,
        folder=folder,
        size_bytes=size_of(folder),
        on_hosts=_on_hosts(run, on_nodes, attempts, nodes, lacking),
        of_head=[each for each in garbage_of_heads(attempts) if Path(each.relative_path).name in ids],
        on_nodes=on_nodes,
        attempts=attempts,
        published=published,
    )


def require_answers(what: str, answers: Mapping[str, T | HostError]) -> dict[str, T]:
    """Return the answers of hosts. Raises a HostError that begins with ``what`` and names all that did not answer."""
    silent = {host: each for host, each in answers.items() if isinstance(each, HostError)}
    if silent:
        reasons = "; ".join(map(str, silent.values()))
        raise HostError(
            f"{what}, because {', '.join(silent)} did not answer: {reasons}. Repair the connection and repeat the "
            f"command. If a host is gone for good, leave it out (--exclude {'@'.join(silent)})",
            silent,
        )
    return {host: each for host, each in answers.items() if not isinstance(each, HostError)}


def _require_idle(folder: Path) -> None:
    if (held_by := holder(folder)) is not None:
        raise in_use(folder, held_by)
    if pids := living_processes(folder):
        raise RunLocked(
            f"ranks of run {folder.name} are still running (processes {' '.join(map(str, pids))}). They end within a "
            "minute; then repeat the command"
        )
    for each in unended(folder):
        launcher = ClusterLauncher(each.run_id)
        if launcher.is_alive and head_lease.age_seconds(launcher.folder) < (each.lease_seconds or 0):
            raise RunLocked(
                f"ranks of run {folder.name} may be running on {', '.join(each.hosts or {})}. Start the run again to "
                "end or continue them, or wait a minute; then repeat the command"
            )


def _on_hosts(
    run: Path, known: FinishedRun, attempts: KnownAttempts, nodes: Nodes, lacking: Mapping[str, HostError]
) -> dict[str, list[Garbage]]:
    """What hosts have of the run. Raises RunLocked if its lease is alive on one of them."""
    if not nodes.hosts and not lacking:
        return {}
    refusal = f"run {run.name!r} is not deleted"
    me = Owner(known.unique_id or "", socket.gethostname(), str(root_of_run(run)), now(), 0.0)
    claims = nodes.ask(ClaimRun(nodes.scratch, known.name, me, Mode.LOOK), _DEADLINE_SECONDS)
    for host, each in require_answers(refusal, {**lacking, **claims}).items():
        if each.owner is not None and each.owner.unique_id == known.unique_id and each.left_seconds > 0:
            raise RunLocked(
                f"run {run.name} is in use on {host} by {each.owner}: its lease is valid for another "
                f"{each.left_seconds:.0f} s. Stop that head, or wait until the lease expires; then repeat the command"
            )
    found = require_answers(refusal, garbage_on(nodes, [known], attempts))
    own = {run_path(known.name), *(f"{ATTEMPTS}/{run_id}" for run_id in attempts.idle)}
    return {host: [each for each in every if each.relative_path in own] for host, every in found.items()}


def _dependents(run: Path, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Other runs under the root that start from a model in one of the folders, and the path of that model."""
    own = [folder.resolve() for folder in folders]
    for other in visible_in(root_of_run(run) / RUNS):
        if other == run or not is_folder(other):
            continue
        start = read_json(other / RUN).get("spec", {}).get("model", {}).get("start_from")
        path = local_folder(start) if start else None
        if path is not None and any(path.resolve().is_relative_to(folder) for folder in own):
            yield other.name, str(start)


def _published_folder(folder: Path) -> Path | None:
    """The folder that the run was published to; None if it was not, or the folder is gone.

    Raises InputError if it is not local, is no longer this run's, or holds other files.
    """
    noted = read_json(folder / PUBLISHED)
    if not noted:
        return None
    local = local_folder(noted["url"])
    if local is None:
        raise InputError(
            f"the run was published to {noted['url']}, and --published deletes only local folders. Leave --published "
            "out, and delete that copy with the store's own tools"
        )
    if (found := publication_at(str(local))) is None:
        return None
    if found.fingerprint != noted["fingerprint"]:
        raise InputError(f"{local} now holds another publication. Leave --published out; that folder then stays")
    if strangers := sorted({*files_below(local)} - {*found.files, MANIFEST}):
        raise InputError(
            f"{local} holds {strangers[0]}, which is not part of the publication. Move it to another place, or leave "
            "--published out; that folder then stays"
        )
    return local


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
            raise StorageError(f"{last} cannot be removed: {explain_os_error(error)}. Or remove it yourself") from error


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
        raise StorageError(f"{folder} cannot be renamed to {hidden}: {explain_os_error(error)}") from error
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

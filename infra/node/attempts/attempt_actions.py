"""Actions on an attempt on this machine: prepare its folder, end its processes, pack its logs, remove it."""

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from infra.node import processes
from infra.node.attempts import attempt, head_lease, shared_memory
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.rank_environment import ENVIRONMENT
from infra.node.attempts.run_ownership import require_owner_of
from infra.node.messages import Done, Query
from infra.node.node_folders import attempt_folder
from infra.node.ports import Endpoint
from infra.node.processes import Belongs, Survivors
from t5train.errors import StorageError
from t5train.files.atomic import write_json, write_text
from t5train.files.run_folder import ATTEMPT_SPEC

_KEPT_BYTES = 32 << 20
"""The most that is sent of a file: of a longer log, only the end."""
GUARDS_SECONDS = 6.0
"""Longer than a guard takes to end its rank and write the exit record."""
RENDEZVOUS = "meeting.json"
"""The file in the folder of an attempt that records the address and port of the rendezvous."""


@dataclass(frozen=True)
class EndAttempt(Query[Survivors]):
    """End an attempt."""

    action = "end"
    run_id: str


def end(request: EndAttempt) -> Survivors:
    """End the attempt."""
    return Survivors(tuple(sorted(end_attempt(attempt_folder(request.run_id)))))


def end_attempt(folder: Path) -> set[int]:
    """End one attempt, and return the pids that survived SIGKILL.

    The lease is removed first. A guard that gets SIGTERM and finds no lease ends its rank at once, without time to
    save, and writes the exit record. A guard that starts without a lease does not start its rank.
    """
    with suppress(OSError):  # if the disk cannot be written, the lease will expire
        (folder / head_lease.LEASE).unlink(missing_ok=True)
    # This machine may also run the launcher of a fenced head. End it with SIGKILL only: on SIGTERM, it would end
    # processes on every host by name.
    processes.end(processes.in_run(attempt.launcher_run_id(folder.name)), grace_seconds=0)
    processes.end(processes.given(str(folder)), GUARDS_SECONDS)
    left = processes.end(of_attempt(folder), grace_seconds=0)
    if not left:
        remove_segments(folder)
    return left


def of_attempt(folder: Path) -> Belongs:
    """Select the processes of an attempt on this machine.

    Ranks have its run id in their environment. Guards and DeepSpeed's launcher have its folder on their command line.
    """
    in_run, given = processes.in_run(folder.name), processes.given(str(folder))
    return lambda pid: in_run(pid) or given(pid)


def remove_segments(folder: Path) -> None:
    """Remove the shared memory of the attempt's ranks. Call this only while none of them is running."""
    if (folder / RENDEZVOUS).exists():
        rendezvous = Endpoint(**json.loads((folder / RENDEZVOUS).read_text("utf-8")))
        shared_memory.remove_all(rendezvous.address, rendezvous.port)


@dataclass(frozen=True)
class Prepared:
    """The answer to PrepareAttempt: the attempt's folder on the node, and the node's boot id."""

    folder: Path
    boot_id: str


@dataclass(frozen=True)
class PrepareAttempt(Query[Prepared]):
    """Create the folder of an attempt, with the files that guards and ranks read."""

    action = "prepare"
    attempt: Attempt
    """The attempt as the head knows it. The node replaces the folder in it with its own."""
    environment: Mapping[str, str]
    """The variables that the head sends to ranks."""
    rendezvous: Endpoint
    owner: str | None
    """Unique id of the run, if its ranks write to the node's own disk."""
    files: Mapping[str, str]
    """Further files of the folder: their texts, by file name."""


def prepare(request: PrepareAttempt) -> Prepared:
    """Create the folder of the attempt and its files.

    Raises StorageError if the folder exists, and RunOwned if another head has taken over the run's files here.
    """
    _require_own_run(request)
    folder = attempt_folder(request.attempt.run_id)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise StorageError(
            f"{folder} already exists: another head has prepared this attempt. Start the run again"
        ) from None
    write_json(folder / ENVIRONMENT, request.environment)
    write_json(folder / RENDEZVOUS, asdict(request.rendezvous))
    for name, text in request.files.items():
        write_text(folder / Path(name).name, text)
    replace(request.attempt, folder=folder).write()
    remove_segments(folder)  # nothing listens on that port, so any segments are left over from a dead run
    head_lease.begin(folder)
    return Prepared(folder, processes.boot_id())


def _require_own_run(request: PrepareAttempt) -> None:
    if request.owner is not None:
        job = json.loads(request.files[ATTEMPT_SPEC])
        require_owner_of(Path(job["run_folder"]), request.owner)


@dataclass(frozen=True)
class PackedFiles:
    """The files of an attempt, as a gzipped tar archive."""

    content: bytes


@dataclass(frozen=True)
class PackLogs(Query[PackedFiles]):
    """Pack the files of an attempt."""

    action = "logs"
    run_id: str


def logs(request: PackLogs) -> PackedFiles:
    """Pack the files of the attempt, without its environment, which can contain secrets."""
    folder, content = attempt_folder(request.run_id), io.BytesIO()
    with (
        gzip.GzipFile(fileobj=content, mode="wb", compresslevel=1) as archive,
        tarfile.open(fileobj=archive, mode="w|") as packed,
    ):
        for path in sorted(folder.glob("*")):
            if path.name != ENVIRONMENT:
                _pack(packed, path)
    return PackedFiles(content.getvalue())


@dataclass(frozen=True)
class RemoveAttempt(Query[Done]):
    """Remove the folder of an attempt."""

    action = "remove"
    run_id: str


def remove(request: RemoveAttempt) -> Done:
    """Remove the folder if it exists."""
    folder = attempt_folder(request.run_id)
    if folder.exists():
        shutil.rmtree(folder)
    return Done()


def _pack(packed: tarfile.TarFile, path: Path) -> None:
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _KEPT_BYTES))
        content = file.read(_KEPT_BYTES)  # read before its size is recorded: a log may still grow
    member = tarfile.TarInfo(path.name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(path.stat().st_mtime)
    packed.addfile(member, io.BytesIO(content))

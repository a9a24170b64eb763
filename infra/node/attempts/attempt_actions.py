"""Actions on an attempt of this machine: prepare its folder, end its processes, pack its logs, remove it.

Also the shared memory of DeepSpeed's CPU collectives, which outlives the ranks that made it. Where all ranks are on one
machine, each makes a file of 66 MiB in /dev/shm, named after its user, the rendezvous and its number, and never removes
it: memory that is lost until the machine is restarted, and that later ranks with the same port would map before its
owner has cleared it. A file that does not fit is cut off silently, and the rank dies of SIGSEGV or SIGBUS when it reads
on. Standard library only, as the guards import it.
"""

import gzip
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from infra.node import processes
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.rank_environment import ENVIRONMENT
from infra.node.attempts.run_ownership import require_owner_of
from infra.node.node_folders import attempt_folder
from infra.node.processes import Belongs
from t5train.errors import StorageError
from t5train.files.atomic import write_json, write_text
from t5train.files.run_folder import ATTEMPT_SPEC

SEGMENTS = Path("/dev/shm")  # noqa: S108 - where shm_open keeps them, by the operating system's rules
RANK_BYTES = 67 << 20
"""What a rank takes at the most: the buffers of csrc/cpu/comm/shm.cpp, and its head."""
REMEDY = (
    "enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm), or end what else uses it "
    "(ls -lS /dev/shm)"
)
_ADDRESS, _PORT, _RANK = "MASTER_ADDR", "MASTER_PORT", "RANK"


class Room(NamedTuple):
    """Bytes of /dev/shm."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.free >> 20} of {self.total >> 20} MiB free"


def room() -> Room | None:
    """What there is on this machine; None where there is no /dev/shm."""
    try:
        found = os.statvfs(SEGMENTS)
    except FileNotFoundError:
        return None
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def require_room(num_ranks: int) -> None:
    """StorageError unless the collectives of so many ranks, all on this machine and its CPU, find their memory."""
    found = room()
    if found is not None and (problem := shortage(found, num_ranks * RANK_BYTES)) is not None:
        raise StorageError(f"this machine: {problem}")


def shortage(found: Room, needed_bytes: int) -> str | None:
    """What is wrong with a /dev/shm, and what to do; None if it has room."""
    if found.free >= needed_bytes:
        return None
    return f"{SEGMENTS} has {found}, its ranks' collectives need {needed_bytes >> 20} MiB: {REMEDY}"


def remove_of_rank(environment: Mapping[str, str] = os.environ) -> None:
    """Remove the segment of the rank that has this environment; ranks that have mapped it keep it."""
    if {_ADDRESS, _PORT, _RANK} <= environment.keys():
        segment = f"{_prefix(environment[_ADDRESS], environment[_PORT])}{int(environment[_RANK])}"
        (SEGMENTS / segment).unlink(missing_ok=True)


def remove_all(address: str, port: int) -> None:
    """Remove the segments of every rank of this machine that met there. All of them must have ended."""
    for segment in SEGMENTS.glob(f"{_prefix(address, str(port))}*"):
        segment.unlink(missing_ok=True)


def _prefix(address: str, port: str) -> str:
    return f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_"


GUARDS_SECONDS = 6.0
"""Longer than guards take that end their rank and write down how it ended."""
MEETING = "meeting.json"
"""In the folder of an attempt: address and port at which its ranks meet."""


def end(request: dict[str, Any]) -> dict[str, Any]:
    """End the attempt ``run_id``; ``left`` are pids that outlived SIGKILL."""
    return {"left": sorted(end_attempt(attempt_folder(request["run_id"])))}


def end_attempt(folder: Path) -> set[int]:
    """End one attempt; returns the pids that outlived even SIGKILL.

    A guard that is told to end and finds no lease knows that there is no time to save, ends its rank and writes down
    how; one that starts now starts nothing.
    """
    with suppress(OSError):  # on a disk that cannot be written the lease runs out by itself
        (folder / head_lease.LEASE).unlink(missing_ok=True)
    # Of a head on this machine that was fenced: on SIGTERM it would end processes of every host by their name.
    processes.end(processes.in_run(attempt.launcher_run_id(folder.name)), grace_seconds=0)
    processes.end(processes.given(str(folder)), GUARDS_SECONDS)
    left = processes.end(of_attempt(folder), grace_seconds=0)
    if not left:
        remove_segments(folder)
    return left


def of_attempt(folder: Path) -> Belongs:
    """Ranks carry the run id; guards, and DeepSpeed's launcher of this machine, were given the folder."""
    in_run, given = processes.in_run(folder.name), processes.given(str(folder))
    return lambda pid: in_run(pid) or given(pid)


def remove_segments(folder: Path) -> None:
    """Remove the shared memory of the attempt's ranks. All of them must have ended, or none have started."""
    if (folder / MEETING).exists():
        meeting = json.loads((folder / MEETING).read_text("utf-8"))
        remove_all(meeting["address"], meeting["port"])


_KEPT_BYTES = 32 << 20
"""Of a log that is longer, the end is gathered."""


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Make the folder of attempt ``run_id``, with what guard and ranks are to know; it must not be there yet.

    ``attempt``, ``environment`` and ``meeting`` are JSON, ``files`` are texts by name. ``owner`` is the unique id of
    the run, if its ranks write on this machine's own disk; RunOwned is raised if another head has the run there by now.
    """
    _require_own_run(request)
    folder = attempt_folder(request["run_id"])
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise StorageError(f"{folder} is there already: another head prepared this very attempt") from None
    write_json(folder / ENVIRONMENT, request["environment"])
    write_json(folder / MEETING, request["meeting"])
    for name, text in request["files"].items():
        write_text(folder / Path(name).name, text)
    attempt.of_facts(folder, request["attempt"]).write()
    remove_segments(folder)  # nothing listens there, so what lies there is a dead run's
    head_lease.begin(folder)
    return {"folder": str(folder), "boot_id": processes.boot_id()}


def _require_own_run(request: dict[str, Any]) -> None:
    if request["owner"] is not None:
        job = json.loads(request["files"][ATTEMPT_SPEC])
        require_owner_of(Path(job["run_folder"]), request["owner"])


def logs(request: dict[str, Any]) -> None:
    """Write the files of attempt ``run_id`` to stdout, as a gzipped tar; its environment stays here."""
    folder = attempt_folder(request["run_id"])
    with (
        gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", compresslevel=1) as stdout,
        tarfile.open(fileobj=stdout, mode="w|") as packed,
    ):
        for path in sorted(folder.glob("*")):
            if path.name != ENVIRONMENT:
                _pack(packed, path)


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the folder of attempt ``run_id``, if it is there."""
    folder = attempt_folder(request["run_id"])
    if folder.exists():
        shutil.rmtree(folder)
    return {}


def _pack(packed: tarfile.TarFile, path: Path) -> None:
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _KEPT_BYTES))
        content = file.read(_KEPT_BYTES)  # read before it is told how long it is: a log may still grow
    member = tarfile.TarInfo(path.name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(path.stat().st_mtime)
    packed.addfile(member, io.BytesIO(content))

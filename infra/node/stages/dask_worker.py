"""A worker of Dask on this host, which makes shards in processes of their own until the head closes the connection.

The worker itself only waits, so it answers the scheduler however busy the processes are. These end with it, because
their stdin does. No process is left when the connection to the head ends, nor when the scheduler is gone.

A host that the scheduler has given up may still finish a shard that another host makes again. That is harmless: both
write the same bytes, each to a file of its own, which then replaces the shard's file at once.
"""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection
from typing import Any, ClassVar, NoReturn

from infra.node.channel import Channel
from infra.node.messages import Request
from infra.node.node_folders import node_folder
from infra.node.stages.dask_settings import Credentials, configure, security, unconfigured_import, without_http
from infra.node.stages.makers import Makers, require_same
from t5train.errors import HostMisconfigured, HostUnreachable, T5TrainError, WorkerLost
from t5train.files.atomic import try_writing
from t5train.files.locks import private_folder
from t5train.files.os_errors import explain
from t5train.host_resources import num_cores

PROGRESS = "progress"
"""The topic of Dask's events about the progress of jobs."""
MAKING_PACKAGES = ("distributed", "isal", "numpy", "pyarrow", "sentencepiece")
"""The packages that the bytes of shards depend on, and Dask."""
_REMEDY = "leave the host out with cluster.exclude, or set shards.executor=local"
_REPORT_SECONDS = 0.5
_START_SECONDS = 30


@dataclass(frozen=True)
class WorkerStart(Request):
    """Starts a conversation: a worker for the scheduler that listens on ``port`` of the head, until stdin ends."""

    action: ClassVar[str] = "tokenise"
    name: str
    """The host's name on the head."""
    port: int
    credentials: Credentials
    lease_seconds: float
    """After this time without contact, the worker and the scheduler give each other up."""
    makers: Makers
    """Those of the head."""
    umask: int
    """The umask of the head, with which files of shards are created."""
    processes: int | None
    """How many shards are made at the same time; None: one per core."""
    probe: Path
    """A file in the folder of the shards that the head has just written."""
    nonce: str
    """The content of that file."""
    sources: Mapping[str, int]
    """The files with the text, each with its size on the head."""


@dataclass(frozen=True)
class WorkerReady:
    """The worker has joined the scheduler."""

    processes: int
    is_compiled: bool
    """Whether the segmenter is compiled on this host."""


class JobFailed(Exception):
    """A job failed on a worker: the name of a class in t5train.errors, the message, and the worker's address."""


def tokenise(request: WorkerStart, head: Channel) -> None:
    """Join the scheduler, and work for it until it is gone or the head closes the connection."""
    require_same(request.makers, _REMEDY)
    _require_shared_files(request)
    here, there = _addresses()
    _require_reachable(there, request.port)
    folder = private_folder(node_folder() / "dask")
    _leave(asyncio.run(_work(request, head, folder, here, f"tls://{there}:{request.port}")))


async def _work(request: WorkerStart, head: Channel, folder: Path, here: str, scheduler: str) -> Path:
    """Work until the scheduler is gone, and return the folder of the worker."""
    with unconfigured_import():
        from distributed import Worker
    configure(request.lease_seconds)
    processes = request.processes or num_cores()
    worker = without_http(Worker)(
        scheduler,
        nthreads=processes,
        name=request.name,
        host=here,
        security=security(request.credentials),
        local_directory=str(folder),
        memory_limit=None,
        death_timeout=_START_SECONDS,
    )
    worker.umask_of_jobs = request.umask
    own = Path(worker.local_directory)
    threading.Thread(target=_end_with_head, args=[own], name="end-with-head", daemon=True).start()
    try:
        await worker
    except (OSError, RuntimeError, TimeoutError) as error:
        raise HostUnreachable(
            f"the head's scheduler of Dask at {scheduler} did not answer within {_START_SECONDS} s "
            f"({' '.join(str(error).split()) or type(error).__name__}), although the port can be reached. Compare the "
            "clocks of both: the certificate of a run is valid from a day before its start"
        ) from error
    head.send(WorkerReady(processes, _segmenter_is_compiled()))
    await worker.finished()
    return own


def _require_shared_files(request: WorkerStart) -> None:
    """Raise HostMisconfigured unless this host shares the folder of the shards with the head, and the text."""
    folder = request.probe.parent
    remedy = "Mount the head's storage at the same path on every host, or set shards.executor=local"
    try:
        is_shared = request.probe.read_text("utf-8") == request.nonce
    except OSError:
        is_shared = False
    if not is_shared:
        raise HostMisconfigured(f"{folder} is not shared with the head, and shards are made there. {remedy}")
    try:
        try_writing(folder)
    except OSError as error:
        raise HostMisconfigured(
            f"shards cannot be written: {folder}: {explain(error)}. Let this user write there, {_REMEDY}"
        ) from error
    for path, size in request.sources.items():
        try:
            found = Path(path).stat().st_size
        except OSError as error:
            raise HostMisconfigured(f"the text cannot be read: {path}: {explain(error)}. {remedy}") from error
        if found != size:
            raise HostMisconfigured(f"{path} has {found:,} bytes here, and {size:,} on the head. {remedy}")


def _addresses() -> tuple[str, str]:
    """Return the addresses of this host and of the head by which the head has reached this host."""
    found = os.environ.get("SSH_CONNECTION", "").split()
    if len(found) != 4:
        raise HostMisconfigured(
            "sshd there does not set SSH_CONNECTION, which holds the head's address. Have the "
            "head connect to sshd directly, not through a program that replaces it"
        )
    head, _, own, _ = (f"[{each}]" if ":" in each else each for each in found)
    return own, head


def _require_reachable(head: str, port: int) -> None:
    try:
        create_connection((head.strip("[]"), port), timeout=_START_SECONDS).close()
    except OSError as error:
        raise HostUnreachable(
            f"the head cannot be reached at {head}, port {port}: {explain(error)}. Allow connections from this host to "
            "the head on ports above 1023; a jump host between them does not forward these"
        ) from error


def _segmenter_is_compiled() -> bool:
    from t5train.data.native import segmenter_build

    return segmenter_build.load(segmenter_build.built()) is not None


def perform(function: str, job: dict[str, Any], number: int) -> None:
    """Do a job in a process of its own, and report its progress and its result as events. Dask's workers call this.

    Raises JobFailed if the job fails.
    """
    from distributed import get_worker

    from t5train.data.worker_processes import in_processes

    worker, done, reported_at = get_worker(), 0, time.monotonic()

    def report(**result: Any) -> None:
        worker.log_event(PROGRESS, {"job": number, "done": done, "worker": worker.address, **result})

    def advance(units: int) -> None:
        nonlocal done, reported_at
        done += units
        if (now := time.monotonic()) - reported_at >= _REPORT_SECONDS:
            reported_at = now
            report()

    report()  # this host takes part: the scheduler gives up a host that reports nothing
    try:
        (result,) = in_processes(function, [job], 1, advance, umask=worker.umask_of_jobs)
    except WorkerLost as error:
        raise JobFailed(WorkerLost.__name__, f"{worker.name}: {error}", worker.address) from None
    except T5TrainError as error:
        raise JobFailed(type(error).__name__, str(error), worker.address) from None
    report(result=result)


def _end_with_head(folder: Path) -> None:
    """End this process when the head closes the connection. The head sends nothing more."""
    os.read(0, 1)
    _leave(folder)


def _leave(folder: Path) -> NoReturn:
    """End at once: threads that wait for their processes would delay a regular end, and the processes end with this."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)

"""A worker of Dask on this host, which makes shards in processes of their own until the head closes the connection.

The worker itself only waits, so it answers the scheduler however busy the processes are. These end with it, because
their stdin does. No process is left when the connection to the head ends, nor when the scheduler is gone.

A host that the scheduler has given up may still finish a shard that another host makes again. That is harmless: both
write the same bytes, each to a file of its own, which then replaces the shard's file at once.
"""

import asyncio
import os
import shutil
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from infra.node.channel import Channel
from infra.node.node_folders import node_folder
from infra.node.tokenising.dask_settings import configure, security, without_http
from infra.node.tokenising.worker_messages import WorkerReady, WorkerStart
from t5train.errors import HostMisconfigured, HostUnreachable, T5TrainError, WorkerLost
from t5train.files.locks import private_folder
from t5train.files.os_errors import explain
from t5train.host_resources import num_cores

PROGRESS = "progress"
"""The topic of Dask's events about the progress of jobs."""
_REPORT_SECONDS = 0.5
_START_SECONDS = 30


class JobFailed(Exception):
    """A job failed on a worker. Its arguments are the name of a class in t5train.errors, and the message."""


def tokenise(request: WorkerStart, head: Channel) -> None:
    """Join the scheduler, and work for it until it is gone or the head closes the connection."""
    _require_same_version(request)
    _require_shared_files(request)
    here, there = _addresses()
    folder = private_folder(node_folder() / "dask")
    _leave(asyncio.run(_work(request, head, folder, here, f"tls://{there}:{request.port}")))


async def _work(request: WorkerStart, head: Channel, folder: Path, here: str, scheduler: str) -> Path:
    """Work until the scheduler is gone, and return the folder of the worker."""
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
    own = Path(worker.local_directory)
    threading.Thread(target=_end_with_head, args=[own], name="end-with-head", daemon=True).start()
    try:
        await worker
    except (OSError, RuntimeError, TimeoutError) as error:
        raise HostUnreachable(
            f"the head's scheduler of Dask at {scheduler} did not answer within {_START_SECONDS} s "
            f"({' '.join(str(error).split()) or type(error).__name__}). Allow connections from this host to the head "
            "on ports above 1023"
        ) from error
    head.send(WorkerReady(processes, _segmenter_is_compiled()))
    await worker.finished()
    return own


def _require_same_version(request: WorkerStart) -> None:
    try:
        found = version("distributed")
    except PackageNotFoundError:
        found = ""
    if found != request.distributed:
        raise HostMisconfigured(
            f"distributed {found or 'missing'}, the head has {request.distributed}. Install it there "
            f"({sys.executable} -m pip install distributed=={request.distributed}), leave the host out with "
            "cluster.exclude, or set shards.executor=local"
        )


def _require_shared_files(request: WorkerStart) -> None:
    """Raise HostMisconfigured unless this host reads the head's root, and the files with the text."""
    remedy = "Mount the head's storage at the same path on every host, or set shards.executor=local"
    try:
        is_shared = request.probe.read_text("utf-8") == request.nonce
    except OSError:
        is_shared = False
    if not is_shared:
        raise HostMisconfigured(f"{request.root} is not shared with the head, where the shards are made. {remedy}")
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
        raise HostMisconfigured("sshd there does not set SSH_CONNECTION, which holds the head's address")
    head, _, own, _ = (f"[{each}]" if ":" in each else each for each in found)
    return own, head


def _segmenter_is_compiled() -> bool:
    from t5train.data.vocabulary import segmenter_build

    return segmenter_build.load(segmenter_build.built()) is not None


def perform(function: str, job: dict[str, Any], number: int) -> None:
    """Do a job in a process of its own, and report its progress and its result as events. Dask's workers call this.

    Raises JobFailed if the job fails.
    """
    from distributed import get_worker

    from t5train.data.worker_processes import in_processes

    worker, done, reported_at = get_worker(), 0, time.monotonic()

    def advance(units: int) -> None:
        nonlocal done, reported_at
        done += units
        if (now := time.monotonic()) - reported_at >= _REPORT_SECONDS:
            reported_at = now
            worker.log_event(PROGRESS, {"job": number, "done": done})

    try:
        (result,) = in_processes(function, [job], 1, advance)
    except WorkerLost as error:
        raise JobFailed(WorkerLost.__name__, f"{worker.name}: {error}") from None
    except T5TrainError as error:
        raise JobFailed(type(error).__name__, str(error)) from None
    worker.log_event(PROGRESS, {"job": number, "done": done, "result": result})


def _end_with_head(folder: Path) -> None:
    """End this process when the head closes the connection. The head sends nothing more."""
    os.read(0, 1)
    _leave(folder)


def _leave(folder: Path) -> NoReturn:
    """End at once: threads that wait for their processes would delay a regular end, and the processes end with this."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)

"""Records of flow runs that have a living process. Each is a file that the process keeps locked until it ends.

The files are in the Prefect home of the server's clients, or in an embedded server's own home. Only the machine that
made a record checks its lock, because locks may not work across hosts that share a home.
"""

import hashlib
import json
import logging
import os
import pwd
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from flows.server.prefect_server import is_embedded
from infra.node.processes import boot_id
from t5train.errors import RunLocked
from t5train.files.locks import is_locked, try_lock

RESTORED = "Restored"
"""Name of the state of a run that was shown as lost, although its process was alive. It belongs to that process."""

_FOLDER = "t5-pretrain-runs"
_NAME = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOCK_SECONDS = 5.0
_log = logging.getLogger(__name__)


class RunRecord(NamedTuple):
    """What a process records about the flow run that it executes."""

    state_id: str
    """Id of the Running state when the process started; another one, unless Restored, belongs to another process."""
    host: str
    boot_id: str

    def is_from_here(self) -> bool:
        """Return whether this machine made it, possibly before a reboot."""
        return self.boot_id == boot_id() or self.host == socket.gethostname()


def records_folder() -> Path:
    """Return the folder with records of flow runs, for the server that this process is a client of."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    return folder_of(settings.home, None if is_embedded(settings.home) else settings.api.url)


def folder_of(home: Path, api_url: str | None) -> Path:
    """Return the folder of records for an embedded server (``api_url`` is None), or for another server."""
    return home / _FOLDER / hashlib.sha256(api_url.encode()).hexdigest()[:16] if api_url else home / _FOLDER


def hold(folder: Path, flow_run_id: UUID, state_id: UUID) -> None:
    """Record that this process executes a flow run, until the process ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / str(flow_run_id), os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(descriptor, _LOCK_SECONDS):
            raise TimeoutError(f"{folder / str(flow_run_id)} is locked by another process")
        os.ftruncate(descriptor, 0)
        record = RunRecord(str(state_id), socket.gethostname(), boot_id())
        os.pwrite(descriptor, json.dumps(record).encode(), 0)  # never closed: the lock is held until this process ends
    except OSError as error:  # training can continue without a record
        _log.warning("could not record this process; if it is killed, Prefect will show its run as Running: %s", error)


@contextmanager
def abandoned(folder: Path) -> Iterator[dict[UUID, RunRecord]]:
    """Yield this machine's records whose processes have ended. The records are locked within the block."""
    with ExitStack() as stack:
        found = {}
        for path in _paths(folder):
            with suppress(FileNotFoundError):  # removed by another process that looks for abandoned runs
                file = stack.enter_context(open(path, "r+b"))
                if try_lock(file.fileno()) and (record := _read(file.fileno())) and record.is_from_here():
                    found[UUID(path.name)] = record
        yield found


@contextmanager
def only_worker(folder: Path) -> Iterator[str]:
    """Yield the name of this user's worker on this machine, and prevent a second one within the block.

    Prefect records with each run the name of the worker that took it. As there is one worker of that name at a time, a
    worker that starts knows that the runs of its predecessor are its own. Raises RunLocked if there is another.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"worker-{socket.gethostname()}.lock"
    with open(path, "ab") as file:
        if not try_lock(file.fileno(), _LOCK_SECONDS):
            raise RunLocked(
                f"another worker of this user runs on this machine for the same Prefect server ({path} is locked): it "
                "takes the runs; stop it first if you want to start a new one"
            )
        yield worker_name()


def worker_name() -> str:
    """Return the name of this user's worker on this machine, such as ``t5@gpu1``."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # some containers have no name for their user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def living(folder: Path) -> set[UUID]:
    """Return the flow runs whose process is alive."""
    return {UUID(path.name) for path in _paths(folder) if is_locked(path)}


def forget(folder: Path, flow_run_id: UUID) -> None:
    """Remove a record."""
    (folder / str(flow_run_id)).unlink(missing_ok=True)


def _paths(folder: Path) -> list[Path]:
    """Return the files that are named after flow runs. Others, such as an editor's copies, are ignored."""
    return (
        [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file()] if folder.is_dir() else []
    )


def _read(descriptor: int) -> RunRecord | None:
    """Return the record; None if a process has created the file but not yet written to it."""
    text = os.pread(descriptor, 4096, 0)
    return RunRecord(*json.loads(text)) if text else None

"""The lease of a run, which shows heads on other machines that it is in use, even if its lock does not exclude them.

The head that holds a run keeps increasing a counter in ``{run}/holder.json``. A head on another machine watches that
counter for longer than the lease, so the clocks of two machines are never compared. On one machine, the lock alone
decides, so a restart after a kill does not have to wait. Standard library only, as guards import it.
"""

import json
import logging
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.node.attempts.attempt import now, shown_time
from infra.node.processes import boot_id
from t5train.errors import RunLocked, StorageError
from t5train.files.locks import is_network_file_system
from t5train.files.os_errors import reason
from t5train.files.ownership import Ownership

HOLDER = "holder.json"
LEASE_SECONDS = 30.0
_RENEW_SECONDS = 2.0
_GLANCE_SECONDS = 6.0
_LOOK_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
"""If two heads write their records at the same moment, each sees after this time whose record remains."""
_WIDTH = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that is using a run."""

    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=boot_id)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=now)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    counter: int = 0
    is_released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {shown_time(self.since)}"

    @property
    def may_be_running_elsewhere(self) -> bool:
        """Whether it has not released the run and may be alive on another machine, which the lock here cannot show."""
        return not self.is_released and self.boot_id != boot_id()


def read(run_folder: Path) -> Holder | None:
    """Read the last holder of a run; None if there was none, or if its record is just being written."""
    path = run_folder / HOLDER
    try:
        return Holder(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}), so it is unknown whether another machine is using the run. "
            "Repair the disk, or the permissions of the file"
        ) from error


def in_use(run_folder: Path, by: object) -> RunLocked:
    """The error to raise because a process, which ``by`` describes, uses a run."""
    return RunLocked(
        f"run {run_folder} is in use by {by}. Wait until that process ends, or stop it with Ctrl-C or a plain `kill` "
        "on its machine; a run that is training saves a checkpoint first"
    )


def holder_elsewhere(run_folder: Path) -> Holder | None:
    """Return the holder on another machine if its counter changes within a few seconds, and None otherwise."""
    found = read(run_folder)
    if found is None or not found.may_be_running_elsewhere:
        return None
    return _moved(run_folder, found, _GLANCE_SECONDS)


class RunLease(Ownership):
    """The record of this process as the holder of a run."""

    def __init__(self, run_folder: Path, lock: int) -> None:
        """Take the run, whose lock this process holds with the descriptor ``lock``.

        The lock stays held until the last write is done, even if the disk hangs for so long that nobody waits for it:
        it must not overwrite the record of the next holder.

        Raises RunLocked if a head on another machine is using it, and StorageError if its record cannot be read or
        written.
        """
        self._folder, self._mine = run_folder, Holder()
        self._await_silence()
        try:
            self._write(os.O_CREAT)
        except OSError as error:
            raise StorageError(
                f"{run_folder / HOLDER} cannot be written: {reason(error, run_folder / HOLDER)}"
            ) from error
        self._settle()
        self._lock = os.dup(lock)
        super().__init__(f"the lease in {run_folder / HOLDER}", _RENEW_SECONDS)

    def _keep(self) -> None:
        try:
            super()._keep()
        finally:
            os.close(self._lock)

    def _renew(self) -> None:
        self._replace(counter=self._mine.counter + 1)

    def _release(self) -> None:
        self._replace(is_released=True)

    def _await_silence(self) -> None:
        found = read(self._folder)
        if found is None or not found.may_be_running_elsewhere:
            return
        _log.warning(
            "%s was last held by %s, which did not release it: checking for %.0f s whether that process still runs",
            self._folder,
            found,
            LEASE_SECONDS,
        )
        if (alive := _moved(self._folder, found, LEASE_SECONDS)) is not None:
            raise RunLocked(
                f"{in_use(self._folder, alive)}. (Its lock is not visible on this machine, because the file system "
                "keeps locks local to each client.)"
            )
        _log.warning("%s is taken over: %s has shown no sign of life", self._folder, found)

    def _settle(self) -> None:
        """Raise RunLocked if a head on another machine wrote its record at the same moment: the last record wins."""
        if not is_network_file_system(self._folder):
            return
        time.sleep(_SETTLE_SECONDS)
        if (found := read(self._folder)) is not None and found.nonce != self._mine.nonce:
            raise RunLocked(f"run {self._folder} was taken by {found} at the same moment. Wait for that process to end")

    def _replace(self, **values: Any) -> None:
        self._mine = replace(self._mine, **values)
        if (found := read(self._folder)) is not None and found.nonce != self._mine.nonce:
            raise RunLocked(
                f"run {self._folder} was taken over by {found}, because this process could not renew "
                f"{self._folder / HOLDER} for {LEASE_SECONDS:.0f} s. Let that process continue, or stop it before "
                "you start the run here again"
            )
        self._write(0)

    def _write(self, how: int) -> None:
        """Overwrite in place, so that a full disk does not end a run. On NFS, other clients see it after the close."""
        text = json.dumps(asdict(self._mine)).encode().ljust(_WIDTH)
        descriptor = os.open(self._folder / HOLDER, os.O_WRONLY | os.O_NOFOLLOW | how, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)


def _moved(run_folder: Path, found: Holder, seconds: float) -> Holder | None:
    """Return the holder once its record differs from ``found``; None if it is then released, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        seen = read(run_folder)
        if seen is not None and seen != found:
            return None if seen.is_released else seen
    return None

"""Shows heads on other machines that a run is being worked on, where the lock of its folder does not exclude them.

The head that holds a run keeps increasing a counter in ``{run}/holder.json``. A head on another machine watches that
counter for longer than the lease: clocks of two machines are never compared. On one machine the lock alone decides, so
a restart after a kill need not wait. Standard library only, as guards import it.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from infra.attempts.attempt import now
from infra.processes import boot_id
from t5train.errors import RunLocked, StorageError
from t5train.mounts import is_network_file_system

HOLDER = "holder.json"
LEASE_SECONDS = 30.0
_RENEW_SECONDS = 2.0
_GLANCE_SECONDS = 6.0
_LOOK_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
"""In which two heads that wrote their records at the same moment see which of them is left."""
_WIDTH = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that works on a run."""

    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=boot_id)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=now)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    counter: int = 0
    is_released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    @property
    def may_be_at_work_elsewhere(self) -> bool:
        """Whether it has not released the run, and the lock on this machine does not tell whether it is alive."""
        return not self.is_released and self.boot_id != boot_id()


def read(run_folder: Path) -> Holder | None:
    """The last holder of a run; None if there was none, or its record is being written at this moment."""
    path = run_folder / HOLDER
    try:
        return Holder(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}), so it is unknown whether another machine works on the run: "
            "repair the disk or the permissions"
        ) from error


def holder_elsewhere(run_folder: Path) -> Holder | None:
    """The holder on another machine, if its counter moves while it is watched for a few seconds."""
    found = read(run_folder)
    if found is None or not found.may_be_at_work_elsewhere:
        return None
    return _moved(run_folder, found, _GLANCE_SECONDS)


class RunLease:
    """The record of this process as the holder of a run, renewed until it is released."""

    def __init__(self, run_folder: Path) -> None:
        """Take the run, whose lock this process holds; RunLocked if a head on another machine is at work on it."""
        self._folder, self._mine = run_folder, Holder()
        self.lost_to: Holder | None = None
        """Who has taken the run over, after this process could not renew its record for too long."""
        self._await_silence()
        try:
            self._write(os.O_CREAT)
        except OSError as error:
            raise StorageError(
                f"{run_folder / HOLDER} cannot be written: {error.strerror}; make room, or repair its permissions"
            ) from error
        self._settle()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease of the run", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let heads on other machines take the run at once."""
        self._closed.set()
        self._thread.join()
        if self.lost_to is None:
            self._mine = replace(self._mine, is_released=True)
            self._try_to_write()

    def _await_silence(self) -> None:
        found = read(self._folder)
        if found is None or not found.may_be_at_work_elsewhere:
            return
        _log.warning(
            "%s was last held by %s, which did not release it: watching for %.0f s whether that process is at work",
            self._folder,
            found,
            LEASE_SECONDS,
        )
        if (alive := _moved(self._folder, found, LEASE_SECONDS)) is not None:
            raise RunLocked(
                f"run {self._folder} is being worked on by {alive}, whose lock is not seen on this machine (the file "
                "system keeps locks local to each client): wait for it to end, or stop it (kill that process there)"
            )
        _log.warning("%s is taken over: %s has shown no sign of life", self._folder, found)

    def _settle(self) -> None:
        """Two heads on two machines may have found no other and written their records at once: the last one counts."""
        if not is_network_file_system(self._folder):
            return
        time.sleep(_SETTLE_SECONDS)
        if (found := read(self._folder)) is not None and found.nonce != self._mine.nonce:
            raise RunLocked(f"run {self._folder} was taken at this moment by {found}: wait for it to end")

    def _renew(self) -> None:
        while not self._closed.wait(_RENEW_SECONDS):
            self._mine = replace(self._mine, counter=self._mine.counter + 1)
            self._try_to_write()
            if self.lost_to is not None:
                _log.error("%s was taken over by %s", self._folder, self.lost_to)
                return

    def _try_to_write(self) -> None:
        try:
            found = read(self._folder)
            if found is not None and found.nonce != self._mine.nonce:
                self.lost_to = found
            else:
                self._write(0)
        except (OSError, StorageError) as error:
            _log.warning("%s cannot be renewed: %s; this is tried again", self._folder / HOLDER, error)

    def _write(self, how: int) -> None:
        """In place, as a full disk must not end a run; a file that is closed is seen by other clients of NFS."""
        text = json.dumps(asdict(self._mine)).encode().ljust(_WIDTH)
        descriptor = os.open(self._folder / HOLDER, os.O_WRONLY | os.O_NOFOLLOW | how, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)


def _moved(run_folder: Path, found: Holder, seconds: float) -> Holder | None:
    """The holder, as soon as its record differs from ``found`` while watched for so long; None if it is released."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        seen = read(run_folder)
        if seen is not None and seen != found:
            return None if seen.is_released else seen
    return None

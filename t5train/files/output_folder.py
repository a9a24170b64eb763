"""The folder that a data stage writes to. Only one process writes at a time, and nothing else is overwritten."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from t5train.errors import StorageError
from t5train.files.locks import flock, try_lock
from t5train.files.made_files import CLAIM
from t5train.files.os_errors import explain

_log = logging.getLogger(__name__)


def stage_folder(root: Path, kind: str, name: str, fingerprint: str) -> Path:
    """Return the folder of a result: ``{root}/{kind}/{name}-{first 12 digits of the fingerprint}``."""
    return root / kind / f"{name}-{fingerprint[:12]}"


@contextmanager
def making(folder: Path, fingerprint: str) -> Iterator[None]:
    """Lock ``folder`` for the result with this fingerprint. If another process is making it, wait for that process.

    The kernel releases the lock when the process ends for any reason. Incomplete files that a killed process left are
    removed. Raises StorageError if the folder cannot be written or holds anything else.
    """
    with _open_claim(folder) as claim:
        lock_or_wait(claim.fileno(), folder)
        for leftover in folder.glob(f".*.{'[0-9a-f]' * 8}.tmp"):
            leftover.unlink()
        try:
            _own(claim, folder, fingerprint)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {explain(error)}") from error
        yield


def lock_or_wait(descriptor: int, result: Path) -> None:
    """Lock an open file or folder exclusively. If another process holds the lock, log that and wait."""
    if not try_lock(descriptor):
        _log.warning("%s is being made by another process: waiting for it", result)
        flock(descriptor, fcntl.LOCK_EX)


def _open_claim(folder: Path) -> TextIO:
    try:
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / CLAIM, "a+", encoding="ascii", errors="replace")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {explain(error)}") from error


def _own(claim: TextIO, folder: Path, fingerprint: str) -> None:
    """Record the fingerprint in the claim. A folder that was claimed but holds no result can be claimed again."""
    claim.seek(0)
    if claim.read() == fingerprint:
        return
    if any(each.name != CLAIM for each in folder.iterdir()):
        raise StorageError(
            f"{folder} holds a result of other inputs or settings, which is not overwritten. Choose another folder, or "
            "remove this one"
        )
    claim.truncate(0)
    claim.write(fingerprint)
    claim.flush()


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not (folder / CLAIM).exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty and was not made by this stage. Choose another folder")

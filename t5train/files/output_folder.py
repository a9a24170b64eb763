"""The folder that a data stage writes to, and which files below a folder runs made.

Only one process writes at a time, and nothing else is overwritten. Files that runs made are recognised by what runs
leave beside them, not by their names.
"""

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path, PurePosixPath

from t5train.errors import StorageError
from t5train.files.locks import flock, try_lock
from t5train.files.os_errors import explain
from t5train.files.run_folder import CLAIM, RUN, RUNS

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


def _open_claim(folder: Path) -> FileIO:
    """Open the claim without a buffer, which would be written again, and fail again, when the file is closed."""
    try:
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / CLAIM, "ab+", buffering=0)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {explain(error)}") from error


def _own(claim: FileIO, folder: Path, fingerprint: str) -> None:
    """Record the fingerprint in the claim. A folder that was claimed but holds no result can be claimed again."""
    claim.seek(0)
    if claim.read() == fingerprint.encode():
        return
    if any(each.name != CLAIM for each in folder.iterdir()):
        raise StorageError(
            f"{folder} holds a result of other inputs or settings, which is not overwritten. Choose another folder, or "
            "remove this one"
        )
    claim.truncate(0)
    claim.write(fingerprint.encode())


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not (folder / CLAIM).exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty and was not made by this stage. Choose another folder")


DOWNLOADED = ".download.json"
"""The end of the name of a downloaded file's note, which lies beside the file."""


class MadeFiles:
    """The files below a folder that runs made under it, whatever their root."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._folders = {PurePosixPath(): False}
        """Whether runs made what is in a folder, by its path relative to ``top``, which itself counts as the user's."""

    def includes(self, file: str) -> bool:
        """Whether runs made a file below ``top``."""
        place = PurePosixPath(file).relative_to(self._top)
        note = f"{file}{DOWNLOADED}"
        return self.includes_folder(place.parent) or os.path.exists(note)  # noqa: PTH110  Path refuses one too long

    def includes_folder(self, place: PurePosixPath) -> bool:
        """The same for all that is in a folder, given relative to ``top``."""
        if place not in self._folders:
            self._folders[place] = self.includes_folder(place.parent) or _is_made(self._top / place)
        return self._folders[place]

    def without(self, files: Iterable[str]) -> list[str]:
        """Return the files that no run made."""
        return [file for file in files if not self.includes(file)]


def _is_made(folder: Path) -> bool:
    """Whether a folder is a run, the result of a data stage, a home of Prefect's server, or that of the regression."""
    marks = [CLAIM]
    if folder.parent.name == RUNS:
        marks += [RUN, "lock"]
    if folder.name.startswith(("prefect", "server")):
        marks += ["api-key"]
    if folder.name == "regression":
        marks += ["nights"]
    return any((folder / mark).exists() for mark in marks)

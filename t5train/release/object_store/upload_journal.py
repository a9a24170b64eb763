"""The attempts of this machine to publish an export, so that a killed one continues.

The journal is a private file beside the export, with one JSON line for each attempt. What has been sent of an attempt,
the server knows.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from t5train.errors import StorageError, StoreError
from t5train.files.atomic import sync_folder
from t5train.files.confined import confined
from t5train.files.locks import try_lock
from t5train.files.os_errors import explain
from t5train.records.digests import FileDigest
from t5train.records.identity import fingerprint
from t5train.release.object_store.store_errors import IN_PROGRESS

_LOCK_SECONDS = 1.0


class Attempt(NamedTuple):
    """An attempt to publish files: the folder of their objects, a digest of their content, and their names."""

    name: str
    content: str
    files: list[str]


class UploadJournal:
    """The journal of one export and one destination. Other processes are kept out."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """``descriptor`` is the locked file at ``path``."""
        self.path, self._descriptor = path, descriptor
        self.attempts = [*self._recorded()]
        """The attempts that may have left objects at the destination; the current one is the last."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, destination: str) -> Iterator[Self]:
        """Open the journal beside the export's ``folder`` and lock it.

        Args:
            folder: The export's folder.
            destination: The server and the URL; each destination has its own journal.

        Raises:
            StoreError: Another process is publishing this export to this destination.
            StorageError: The journal cannot be written.

        """
        key = hashlib.sha256(destination.encode()).hexdigest()[:16]
        path = folder.absolute().with_name(f".{folder.absolute().name}.upload-{key}.jsonl")
        try:
            descriptor = _open_locked(path)
        except OSError as error:
            raise StorageError(f"{path}, the journal of the upload, cannot be written: {explain(error)}") from error
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def continue_attempt(self, identity: str, files: Mapping[str, FileDigest]) -> str:
        """Return the name of the current attempt. Unless it is of exactly these files, a new one is begun.

        ``identity`` is the fingerprint of what is published, with which the name begins.
        """
        content = fingerprint({name: digest.sha256 for name, digest in files.items()})
        if not self.attempts or self.attempts[-1].content != content:
            self._record(Attempt(f"{identity[:12]}-{secrets.token_hex(8)}", content, sorted(files)))
        return self.attempts[-1].name

    def remove(self) -> None:
        """Remove the journal, after the publication was decided."""
        self.path.unlink(missing_ok=True)

    def _record(self, attempt: Attempt) -> None:
        fields = {"attempt": attempt.name, "content": attempt.content, "files": attempt.files}
        line = f"\n{json.dumps(fields)}\n".encode()  # after a line that a crash has cut off
        try:
            with open(self._descriptor, "ab", closefd=False) as file:
                file.write(line)
            os.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {explain(error)}") from error
        self.attempts.append(attempt)

    def _recorded(self) -> Iterator[Attempt]:
        """Yield the attempts in the file. Other lines are cut off, or an earlier version recorded parts in them."""
        for line in os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).splitlines():
            try:
                fields = json.loads(line)
                attempt = Attempt(fields["attempt"], fields["content"], fields["files"])
            except (ValueError, KeyError, TypeError):
                continue
            for file in attempt.files:
                confined(Path(), file, str(self.path))
            yield attempt


def _open_locked(path: Path) -> int:
    """Return a descriptor that holds the file's lock. If the file is missing, it is created, for its owner only."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        locked = try_lock(descriptor, _LOCK_SECONDS)
        if locked and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            sync_folder(path.parent)
            return descriptor
        os.close(descriptor)
        if not locked:
            raise StoreError(
                f"another process is publishing this export to the same destination ({path} is locked): wait for it to "
                "end, then publish again",
                code=IN_PROGRESS,
            )

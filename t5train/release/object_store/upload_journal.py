"""What this machine knows of an upload that has not been committed yet, so that a killed one continues.

The journal is a private file beside the export, with one JSON line for each event. A line that a crash cut off, and
what follows it, is ignored: at most, parts that it names are sent again.
"""

import errno
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from t5train.errors import StorageError, StoreError
from t5train.files.atomic import sync_folder
from t5train.files.confined import confined
from t5train.files.locks import try_lock
from t5train.files.os_errors import explain
from t5train.records.digests import FileDigest
from t5train.records.identity import fingerprint
from t5train.release.object_store.store_errors import IN_PROGRESS
from t5train.release.object_store.transfers import Stopped

_LOCK_SECONDS = 1.0


@dataclass
class SentPart:
    """A part that the server has confirmed."""

    etag: str
    crc: int


@dataclass
class OpenUpload:
    """A multipart upload of one file. All parts have ``part_bytes``, except the last."""

    upload_id: str
    part_bytes: int
    parts: dict[int, SentPart] = field(default_factory=dict)


@dataclass
class Attempt:
    """An attempt to publish files: the folder of their objects, a digest of their content, and their names."""

    name: str
    content: str
    files: list[str]


class UploadJournal:
    """The journal of one export and one destination. Threads can share it; other processes are kept out."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """``descriptor`` is the locked file at ``path``."""
        self.path = path
        self.uploads: dict[str, OpenUpload] = {}
        self.stored: set[str] = set()
        self.attempts: list[Attempt] = []
        """The attempts that may have left objects at the destination; the current one is the last."""
        self._abandoned: list[tuple[str, str]] = []
        self._descriptor, self._writing, self._is_closed = descriptor, threading.Lock(), False
        self._replay()

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
        journal = None
        try:
            journal = cls(path, descriptor)
            yield journal
        finally:
            if journal is not None:
                journal.close()
            os.close(descriptor)

    def continue_attempt(self, identity: str, files: Mapping[str, FileDigest]) -> str:
        """Return the name of the current attempt. Unless it is of exactly these files, a new one is begun.

        ``identity`` is the fingerprint of what is published, with which the name begins.
        """
        content = fingerprint({name: digest.sha256 for name, digest in files.items()})
        if not self.attempts or self.attempts[-1].content != content:
            name = f"{identity[:12]}-{secrets.token_hex(8)}"
            self._record({"attempt": name, "content": content, "files": sorted(files)})
        return self.attempts[-1].name

    def begin(self, file: str, upload_id: str, part_bytes: int) -> None:
        """Record a new multipart upload of a file, which replaces an earlier one."""
        self._record({"begun": file, "upload_id": upload_id, "part_bytes": part_bytes})

    def add_part(self, file: str, number: int, etag: str, crc: int) -> None:
        """Record that the server has a part."""
        self._record({"file": file, "part": number, "etag": etag, "crc": crc})

    def forget(self, file: str) -> None:
        """Record that the file's upload is no longer of use, or that its object is not what it should be."""
        self._record({"forgotten": file})

    def add_stored(self, file: str) -> None:
        """Record that the object of a file is complete and proven."""
        self._record({"stored": file})

    def open_uploads(self) -> list[tuple[str, str]]:
        """Names and ids of the multipart uploads of all attempts that may still be open."""
        return [*self._abandoned, *self._begun()]

    def close(self) -> None:
        """Accept no more events. A thread that is still sending would write to whatever file gets the descriptor."""
        with self._writing:
            self._is_closed = True

    def remove(self) -> None:
        """Remove the journal, after the publication was decided."""
        self.path.unlink(missing_ok=True)

    def _begun(self) -> list[tuple[str, str]]:
        return [(f"{self.attempts[-1].name}/{file}", upload.upload_id) for file, upload in self.uploads.items()]

    def _record(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        with self._writing:
            if self._is_closed:
                raise Stopped
            try:
                self._append(line)
            except OSError as error:
                raise StorageError(f"{self.path} cannot be written: {explain(error)}") from error
            self._apply(event)

    def _append(self, line: bytes) -> None:
        """Append a whole line, or nothing."""
        if (written := os.write(self._descriptor, line)) != len(line):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self._descriptor)

    def _replay(self) -> None:
        """Apply the events in the file, and cut off what cannot be read."""
        content, end = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0), 0
        for line in content.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError):
                break
            end += len(line)
        os.ftruncate(self._descriptor, end)

    def _apply(self, event: dict[str, Any]) -> None:
        match event:
            case {"attempt": name, "content": content, "files": files}:
                for file in files:
                    confined(Path(), file, str(self.path))
                self._abandoned += self._begun()
                self.attempts.append(Attempt(name, content, files))
                self.uploads.clear()
                self.stored.clear()
            case {"begun": file, "upload_id": upload_id, "part_bytes": part_bytes}:
                self.uploads[file] = OpenUpload(upload_id, part_bytes)
            case {"file": file, "part": number, "etag": etag, "crc": crc}:
                self.uploads[file].parts[number] = SentPart(etag, crc)
            case {"forgotten": file}:
                self.uploads.pop(file, None)
                self.stored.discard(file)
            case {"stored": file}:
                self.uploads.pop(file, None)
                self.stored.add(file)
            case _:
                raise ValueError(event)


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

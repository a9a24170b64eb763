"""Memory, disks and descriptors of a node, and whether it sees the head's folder."""

import os
import resource
import shutil
import tempfile
from pathlib import Path

from infra.node_folder import node_folder
from infra.preflight.facts import Question, Room
from t5train.errors import StorageError
from t5train.host_memory import host_memory_bytes


def room(question: Question) -> Room:
    """What there is, and what the head's nonce says here."""
    root = Path(question.root)
    folder, folder_error = _node_folder()
    return Room(
        memory_bytes=host_memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        nonce=_read(Path(question.nonce_path)),
        root_error=_write_error(root),
        root_free_bytes=_free_bytes(root),
        node_folder=folder,
        node_folder_error=folder_error,
        node_folder_free_bytes=_free_bytes(Path(folder)),
    )


def _node_folder() -> tuple[str, str]:
    """Its path, and why it is of no use, if so."""
    try:
        folder = node_folder()
    except StorageError as error:
        return "", str(error)
    reason = _write_error(folder)
    return str(folder), f"{folder} cannot be written ({reason}): make room there, or mend its disk" if reason else ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except OSError:
        return None


def _write_error(folder: Path) -> str:
    """A file is really made, because permissions do not tell of read-only and full file systems."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error.strerror)
    return ""


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0

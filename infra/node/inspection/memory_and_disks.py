"""Memory, disk space and file descriptors of a node, and whether it can read the head's file under the root."""

import resource
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infra.node.attempts import shared_memory
from infra.node.inspection.facts import Question, Resources
from infra.node.node_folders import node_folder, run_path, scratch_folder, within
from infra.node.processes import identity
from infra.node.storage.disk_usage import staged_paths, users
from infra.node.storage.garbage import size_of
from t5train.errors import StorageError
from t5train.files.atomic import try_writing
from t5train.files.os_errors import free_inodes, reason
from t5train.host_resources import host_memory_bytes

_MARK = ".mark"


def resources(question: Question) -> Resources:
    """Memory, disk space and file descriptors, and the head's nonce as this node reads it."""
    root, nonce = question.root, _read(question.nonce_path)
    folder, folder_error = _node_folder()
    has_own = nonce is None or identity() == question.head
    scratch = _Scratch.of(question.scratch, question.run_on_nodes) if has_own else _Scratch()
    shared = shared_memory.free_space() or shared_memory.FreeSpace(0, 0)
    return Resources(
        memory_bytes=host_memory_bytes(),
        shared_memory_bytes=shared.total,
        shared_memory_free_bytes=shared.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        nonce=nonce,
        root_error=_write_error(root),
        root_free_bytes=_free_bytes(root),
        node_folder=folder,
        node_folder_error=folder_error,
        node_folder_free_bytes=_free_bytes(Path(folder)),
        scratch=scratch.path,
        scratch_mark=scratch.mark,
        scratch_error=scratch.error,
        scratch_free_bytes=_free_bytes(Path(scratch.path)),
        scratch_yielding_bytes=scratch.yielding_bytes,
        root_free_inodes=_free_inodes(root),
        node_folder_free_inodes=_free_inodes(Path(folder)),
        scratch_free_inodes=_free_inodes(Path(scratch.path)) if scratch.path else None,
    )


def _node_folder() -> tuple[str, str]:
    """The path of the node folder, and why it cannot be used; empty if it can."""
    try:
        folder = node_folder()
    except StorageError as error:
        return "", str(error)
    why = _write_error(folder)
    return str(folder), f"{folder} cannot be written: {why}" if why else ""


@dataclass(frozen=True)
class _Scratch:
    """The scratch folder, and what was found there."""

    path: str = ""
    mark: str = ""
    error: str = ""
    yielding_bytes: int = 0

    @classmethod
    def of(cls, chosen: Path | None, run_name: str | None) -> Self:
        """Create it if it does not exist, and check whether it can be written."""
        try:
            folder = scratch_folder(chosen)
            why = _write_error(folder)
            mark = "" if why else _mark(folder / _MARK)
        except StorageError as error:
            return cls(error=str(error))
        unwritable = f"{folder} (storage.scratch) cannot be written: {why}" if why else ""
        return cls(str(folder), mark, unwritable, _yielding_bytes(folder, run_name))


def _yielding_bytes(scratch: Path, run_name: str | None) -> int:
    unused = [
        relative_path for relative_path in staged_paths(scratch) if not set(users(scratch, relative_path)) - {run_name}
    ]
    own = [run_path(run_name)] if run_name else []
    return sum(size_of(within(scratch, path)) for path in [*own, *unused])


def _mark(path: Path) -> str:
    """Return the random mark in a file, which is created once and never changes."""
    mark = secrets.token_hex(16)
    written = path.with_name(f"{path.name}-{mark}")
    written.write_text(mark, "ascii")
    with suppress(FileExistsError):
        path.hardlink_to(written)  # atomic, in case another host has the same folder
    written.unlink()
    return path.read_text("ascii")


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except OSError:
        return None


def _write_error(folder: Path) -> str:
    """Why a folder cannot be written, and the remedy; empty if it can."""
    try:
        try_writing(folder)
    except OSError as error:
        return reason(error, folder)
    return ""


def _free_inodes(folder: Path) -> int | None:
    try:
        return free_inodes(folder)
    except OSError:
        return None


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0

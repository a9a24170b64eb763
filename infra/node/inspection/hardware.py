"""The hardware of a node: accelerators, memory and disks, and whether it can read the head's file under the root."""

import fcntl
import resource
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Self

from infra.node.attempts import shared_memory
from infra.node.inspection.facts import Devices, Question, Resources
from infra.node.inspection.software import torch_runtime
from infra.node.node_folders import locks_folder, node_folder, run_path, scratch_folder, within
from infra.node.processes import identity
from infra.node.storage.disk_usage import staged_paths, users
from infra.node.storage.garbage import size_of
from t5train.errors import StorageError
from t5train.files.atomic import try_writing
from t5train.files.os_errors import free_inodes, reason
from t5train.host_resources import host_memory_bytes

CPU = "cpu"
_WITHOUT = Devices(CPU, count=0, used_bytes={}, total_bytes={}, held_by={}, error="")
_MARK = ".mark"


def devices(question: Question) -> Devices:
    """The accelerators that torch finds, and this user's runs that hold the slots. Imports torch only if it has to."""
    if question.accelerator == CPU or (question.accelerator is None and not can_have_any()):
        return _WITHOUT
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        return Devices(question.accelerator or "", 0, {}, {}, {}, f"torch cannot be imported: {error}")
    if (found := torch.accelerator.current_accelerator(check_available=True)) is None:
        return _WITHOUT
    count = torch.accelerator.device_count()
    used, total = _memory([slot for slot in question.slots if slot < count])
    return Devices(found.type, count, used, total, _held(found.type, question.slots), "")


def can_have_any() -> bool:
    """Whether torch was built for an accelerator, or a package adds one to it; checked without importing torch."""
    return bool(torch_runtime()) or bool(entry_points(group="torch.backends"))


def _memory(slots: Iterable[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes in use by all processes, and total bytes, by slot; without accelerators that do not report them."""
    import torch

    used, total = {}, {}
    for slot in slots:
        try:
            free_bytes, total_bytes = torch.accelerator.get_memory_info(slot)
        except (RuntimeError, NotImplementedError, AttributeError):  # needs torch 2.9, and not every kind supports it
            continue
        used[str(slot)], total[str(slot)] = total_bytes - free_bytes, total_bytes
    return used, total


def _held(kind: str, slots: Iterable[int]) -> dict[str, str]:
    folder = locks_folder()
    held = {slot: by for slot in slots if (by := holder(folder / f"{kind}-{slot}.lock")) is not None}
    return {str(slot): holder for slot, holder in held.items()}


def holder(lock: Path) -> str | None:
    """The holder of a lock, as written in the lock file; None if the lock is free."""
    if not lock.exists():
        return None
    with open(lock, encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200).strip() or "another run of this user"
    return None


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

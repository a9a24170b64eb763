"""The hardware of a node: accelerators, memory and disks, and whether it can read the head's file under the root."""

import fcntl
import resource
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from infra.node.attempts import shared_memory
from infra.node.inspection.facts import Devices, Folder, Question, Resources
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
    nonce, shared = _read(question.nonce_path), shared_memory.free_space() or shared_memory.FreeSpace(0, 0)
    found = Resources(
        memory_bytes=host_memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory_bytes=shared.total,
        shared_memory_free_bytes=shared.free,
        nonce=nonce,
        root=_folder(lambda: question.root),
        node_folder=_folder(node_folder),
    )
    if nonce is not None and identity() != question.head:
        return found
    scratch = _folder(lambda: scratch_folder(question.scratch), " (storage.scratch)")
    if not scratch.path:
        return replace(found, scratch=scratch)
    place = Path(scratch.path)
    mark = "" if scratch.error else _mark(place / _MARK)
    yielding_bytes = _yielding_bytes(place, question.run_on_nodes)
    return replace(found, scratch=scratch, scratch_mark=mark, scratch_yielding_bytes=yielding_bytes)


def _folder(make: Callable[[], Path], called: str = "") -> Folder:
    """Return whether the folder that ``make`` returns, and may create, can be written, and what is free there."""
    try:
        path = make()
    except StorageError as error:
        return Folder("", str(error), 0)
    why = ""
    try:
        try_writing(path)
    except OSError as error:
        why = f"{path}{called} cannot be written: {reason(error, path)}"
    try:
        return Folder(str(path), why, shutil.disk_usage(path).free, free_inodes(path))
    except OSError:
        return Folder(str(path), why, 0)


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

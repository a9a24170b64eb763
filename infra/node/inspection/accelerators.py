"""Accelerators of a node: how many there are, and whether they are in use. torch is imported only if it is needed."""

import fcntl
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from infra.node.inspection.facts import Devices, Question
from infra.node.inspection.software import torch_runtime
from infra.node.node_folders import locks_folder

CPU = "cpu"
_WITHOUT = Devices(CPU, count=0, used_bytes={}, total_bytes={}, held_by={}, error="")


def devices(question: Question) -> Devices:
    """The accelerators that torch finds, and the runs of this user that hold the requested slots."""
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

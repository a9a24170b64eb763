"""Cores, memory and disk space of this machine, checked before anything expensive starts.

Uses only the standard library, because nodes import it.
"""

import errno
import os
import shutil
from pathlib import Path

from t5train.errors import SpecError, StorageError
from t5train.files.atomic import try_writing
from t5train.files.os_errors import free_inodes, nearest_existing, reason
from t5train.quantities import format_bytes

_LEAST_INODES = 100
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

_GROUP_USAGE = (("memory.current", ""), ("memory.usage_in_bytes", "total_"))
_MEMORY = Path("/proc/meminfo")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory_bytes() -> int:
    """Return the machine's memory, or the limit of this process's control group if that is lower."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += [int(text) for path in _GROUP_LIMITS if path.exists() and (text := path.read_text().strip()) != "max"]
    return min(limits)


def available_host_memory_bytes() -> int:
    """Return how much more memory this process can use now: what is free, and what the kernel would free for it."""
    facts = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    found = [int(facts["MemAvailable"].split()[0]) << 10]
    for path, (used, prefix) in zip(_GROUP_LIMITS, _GROUP_USAGE, strict=True):
        if path.exists() and (limit := path.read_text().strip()) != "max":
            held = dict(line.split() for line in path.with_name("memory.stat").read_text().splitlines())
            cached = sum(int(held[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            found.append(int(limit) - int(path.with_name(used).read_text()) + cached)
    return max(0, min(found))


def require_host_memory(needed_bytes: int, decided_by: str) -> None:
    """Raise SpecError, naming the settings in question, unless this machine has ``needed_bytes`` of memory in total."""
    if (found := host_memory_bytes()) < needed_bytes:
        raise SpecError(
            f"{decided_by} need {format_bytes(needed_bytes)} of host memory, but this machine has "
            f"{format_bytes(found)}. Keep more on the accelerators (layout.offload), or use fewer ranks, a "
            "smaller model or a larger machine (--dry-run shows the memory that each part needs)"
        )


def require_space(root: Path, needed_bytes: int, what: str) -> None:
    """Create ``root`` if necessary, and raise StorageError unless ``needed_bytes`` for ``what`` fit in it."""
    make_root(root)
    require_free_space(root, needed_bytes, what)


def make_root(root: Path) -> None:
    """Create ``root``, which only its user may enter, unless it exists. Raises StorageError if it cannot be written."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try_writing(root)
    except OSError as error:
        raise _not_writable(root, error) from error


def require_free_space(root: Path, needed_bytes: int, what: str) -> None:
    """Raise StorageError unless ``needed_bytes`` for ``what`` fit in ``root``, which need not exist yet."""
    free_bytes, inodes = free_space_bytes(root), free_inodes(nearest_existing(root))
    if inodes is not None and inodes < _LEAST_INODES:
        raise StorageError(
            f"too few inodes for {what}: the disk of {root} has {inodes:,} free, but {_LEAST_INODES:,} are needed, one "
            "for each file and folder. Remove files from that disk (`df -i` shows its inodes), or choose another root "
            "(--root or --out)"
        )
    if free_bytes < needed_bytes:
        raise StorageError(
            f"too little disk space for {what}: {root} has {format_bytes(free_bytes)} free, but "
            f"{format_bytes(needed_bytes)} are needed. Free {format_bytes(needed_bytes - free_bytes)}, or choose "
            "another root (--root or --out)"
        )


def free_space_bytes(root: Path) -> int:
    """Return how many bytes are free where ``root`` is or would be created."""
    return shutil.disk_usage(nearest_existing(root)).free


def require_writable(root: Path) -> None:
    """Raise StorageError if ``root``, or its nearest existing parent, cannot be written. Creates nothing.

    A full disk passes, because there may be nothing left to write.
    """
    try:
        try_writing(nearest_existing(root))
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise _not_writable(root, error) from error


def _not_writable(root: Path, error: OSError) -> StorageError:
    return StorageError(f"{root} cannot be written: {reason(error, root)} (--root or --out)")

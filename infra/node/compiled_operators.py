"""The C++ operators that DeepSpeed compiles for CPU ranks and for host memory, and locks that killed compiles left.

::

    python -m infra.node.compiled_operators        compile them now (about two minutes), so that the first run need not

torch takes a file named ``lock`` as a sign that another process compiles, and waits for it to vanish, forever. The
process that compiles keeps that file open, which tells a live compile from a killed one, provided that it runs on this
machine: so locks on a disk that machines share are left alone.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from infra.node.attempts.rank_environment import search_path
from infra.node.operator_folder import VARIABLE, operator_folder

# Of others, such as nfs, lustre, cifs and fuse, other machines may have files open that no process here has.
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def is_on_local_disk(path: Path) -> bool:
    """Whether the file system of a path is of a kind that only one machine mounts."""
    return _file_system(path.resolve()) in _LOCAL


def _file_system(path: Path) -> str:
    """That of the deepest mount point above the path; of several there, the last one hides the others."""
    found = (0, "")
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        fields, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split(" ")[4]))
        if path.is_relative_to(point) and len(point.parts) >= found[0]:
            found = (len(point.parts), after.split(" ")[0])
    return found[1]


_log = logging.getLogger(__name__)
_RELEASE_SECONDS = 0.5


def clear_stale_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Remove locks that no process holds from the cache that ranks with this environment use; returns them."""
    return [lock for lock in _files(environment, "lock") if _clear(lock)]


def shared_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Locks in that cache that a process of another machine may hold."""
    return [lock for lock in _files(environment, "lock") if not is_on_local_disk(lock)]


def missing(names: Iterable[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Those of these operators that will have to be compiled."""
    return sorted(set(names) - set(compiled(environment)))


def foreign_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Locks in that cache that another user made, and only that user can remove."""
    return [lock for lock in _files(environment, "lock") if _owner(lock) not in {os.getuid(), None}]


def compiled(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the operators that lie compiled in that cache."""
    return sorted({path.stem for path in _files(environment, "*.so")})


def warm() -> None:
    """Compile DeepSpeed's shared-memory collectives for CPU ranks, and Adam, where ranks look for them."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = search_path()
    os.environ[VARIABLE] = str(operator_folder())
    clear_stale_locks()
    _log.info("%s: compiling what is missing of DeepSpeed's operators, about a minute each", os.environ[VARIABLE])
    from deepspeed.accelerator import get_accelerator

    for builder in ("ShareMemCommBuilder", "CPUAdamBuilder"):
        get_accelerator().create_op_builder(builder).load()


def _files(environment: Mapping[str, str], pattern: str) -> Iterator[Path]:
    return operator_folder(environment).glob(f"*/{pattern}")


def _clear(lock: Path) -> bool:
    """Remove a lock that is held neither now nor a moment later; one cleaner at a time.

    A compile that has just finished closes its lock an instant before it removes it, hence the second look.
    """
    folder = os.open(lock.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not _is_stale(lock):
            return False
        time.sleep(_RELEASE_SECONDS)
        if not _is_stale(lock):
            return False
        lock.unlink()
    finally:
        os.close(folder)
    _log.warning("removed %s, left behind by a compile that was killed", lock)
    return True


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except FileNotFoundError:
        return None


def _is_stale(lock: Path) -> bool:
    try:
        status = lock.stat()
    except FileNotFoundError:
        return False
    if not is_on_local_disk(lock):
        _log.warning(
            "%s is on a disk that other machines may use, so a compile there may hold it: if none does and runs hang "
            "at their start, remove it",
            lock,
        )
        return False
    if status.st_uid != os.getuid():
        _log.warning("%s is another user's: if runs hang at their start, that user must remove it", lock)
        return False
    return not any(_opens(process, status) for process in Path("/proc").glob("[0-9]*"))


def _opens(process: Path, status: os.stat_result) -> bool:
    """Whether a process has the file open; what cannot be seen is another user's, and so is no compile of ours."""
    try:
        descriptors = list((process / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return any(_is_same(descriptor, status) for descriptor in descriptors)


def _is_same(descriptor: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), status)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # closed since it was listed


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warm()

"""The C++ operators that DeepSpeed compiles for CPU ranks and host memory, and the locks that killed compiles leave.

::

    python -m infra.node.compiled_operators        compile them now (about two minutes) instead of in the first run

If there is a file named ``lock``, torch assumes that another process is compiling, and waits without limit until the
file disappears. A live compile keeps that file open and a killed one does not, but only processes on this machine can
be checked. Locks on a disk that machines share are therefore never removed.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from infra.node.attempts.rank_environment import search_path
from infra.node.operator_folder import VARIABLE, operator_folder
from t5train.files.atomic import try_writing
from t5train.files.locks import file_system
from t5train.files.os_errors import nearest_existing

# On other types, such as nfs, lustre, cifs and fuse, a process on another machine may have a file open.
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})


def is_on_local_disk(path: Path) -> bool:
    """Whether the file system of a path is of a kind that only one machine mounts."""
    return file_system(path) in _LOCAL


_log = logging.getLogger(__name__)
_RELEASE_SECONDS = 0.5
_BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder")


def clear_stale_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Remove the locks that no process holds from the operator folder of this environment, and return them."""
    return [lock for lock in _files(environment, "lock") if _clear(lock)]


def shared_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Locks in the operator folder of this environment that a process on another machine may hold."""
    return [lock for lock in _files(environment, "lock") if not is_on_local_disk(lock)]


def missing(names: Iterable[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Operators among ``names`` that still have to be compiled."""
    return sorted(set(names) - set(compiled(environment)))


def foreign_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Locks in the operator folder of this environment that belong to another user, who alone can remove them."""
    return [lock for lock in _files(environment, "lock") if _owner(lock) not in {os.getuid(), None}]


def compiled(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the compiled operators in the operator folder of this environment."""
    return sorted({path.stem for path in _files(environment, "*.so")})


def unwritable(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Folders in which ranks with this environment could create no file, and why, by path."""
    folder, found = operator_folder(environment), dict[str, str]()
    present = nearest_existing(folder)
    for each in (present, *(folder.glob("*/") if present == folder else ())):
        try:
            try_writing(each)
        except OSError as error:
            found[str(each)] = str(error.strerror)
    return found


def unwritable_text(found: Mapping[str, str]) -> str:
    """What ``unwritable`` found, in words, and what to do; ``found`` is not empty."""
    folder, reason = next(iter(found.items()))
    return (
        f"{folder}, where DeepSpeed compiles its operators, cannot be written ({reason}). Ranks create a lock there "
        "even if all are compiled. Make it writable, or set TORCH_EXTENSIONS_DIR to another folder"
    )


def warm() -> None:
    """Compile DeepSpeed's shared-memory collectives for CPU ranks, and Adam, into the folder that ranks use."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = search_path()
    os.environ[VARIABLE] = str(operator_folder())
    clear_stale_locks()
    from deepspeed.accelerator import get_accelerator

    for number, builder in enumerate(_BUILDERS, 1):
        what = f"DeepSpeed operator {number} of {len(_BUILDERS)}, {builder.removesuffix('Builder')}"
        _log.info("%s: compiling if missing, up to two minutes: %s", os.environ[VARIABLE], what)
        get_accelerator().create_op_builder(builder).load()


def _files(environment: Mapping[str, str], pattern: str) -> Iterator[Path]:
    return operator_folder(environment).glob(f"*/{pattern}")


def _clear(lock: Path) -> bool:
    """Remove a lock if no process holds it now or a moment later; returns whether it was removed.

    A compile that has just finished closes its lock an instant before it removes it, hence the second check. Only one
    process at a time removes locks.
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
            "the compile lock %s is on a disk that other machines may use, and one of them may hold the lock. If runs "
            "hang at start and no machine is compiling, remove the lock",
            lock,
        )
        return False
    if status.st_uid != os.getuid():
        _log.warning(
            "the compile lock %s belongs to another user. If runs hang at start, ask that user to remove it", lock
        )
        return False
    return not any(_opens(process, status) for process in Path("/proc").glob("[0-9]*"))


def _opens(process: Path, status: os.stat_result) -> bool:
    """Whether a process has the file open. A process that cannot be inspected is another user's, so not our compile."""
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

"""Code that heads have sent to this node (infra.cluster.code_on_node), as far as nobody uses it any more.

An attempt uses its code as long as its files are here, a process as long as it runs; and what was wanted within the
last hour may be about to be used.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra import processes
from infra.attempts import attempt
from infra.node_folder import CODE, attempts_folder, node_path
from t5train.atomic_folder import discard
from t5train.file_lock import try_lock

_KEPT_SECONDS = 3600.0
_LOCK_WAIT_SECONDS = 10.0


def unused_code() -> Iterator[Path]:
    """Folders of such code, and what is left of some that was being put here or removed when that was killed."""
    if not node_path(CODE).is_dir():
        return
    kept = {attempt.read(path.parent).code for path in attempts_folder().glob(f"*/{attempt.ATTEMPT}")}
    for folder in sorted(node_path(CODE).iterdir()):
        if folder.name not in kept and _is_old(folder) and not processes.find(_runs_from(folder)):
            yield folder


def remove_code(folder: Path) -> bool:
    """Remove one of these, unless it is used by now; whether that was done."""
    with _locked(folder.parent) as is_locked:
        if not is_locked or folder not in unused_code():
            return False
        discard(folder)
        return True


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.lstat().st_mtime > _KEPT_SECONDS
    except FileNotFoundError:  # somebody else's partial folder, which has its name now
        return False


def _runs_from(folder: Path) -> processes.Belongs:
    return lambda pid: str(folder) in processes.variable(pid, "PYTHONPATH").split(os.pathsep)


@contextmanager
def _locked(code: Path) -> Iterator[bool]:
    """Against heads that are about to want it."""
    descriptor = os.open(code, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield try_lock(descriptor, _LOCK_WAIT_SECONDS)
    finally:
        os.close(descriptor)

"""The folder a result appears in: whole or not at all, and never over something else."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from t5train.atomic import sync_folder
from t5train.atomic_folder import partial_folder, rename_aside
from t5train.errors import RecordError, StorageError
from t5train.os_errors import explain
from t5train.records import MANIFEST, Weights

_log = logging.getLogger(__name__)
_SPARE_BYTES = 16 << 20


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """The ``partial_folder`` of ``out``, to be moved by ``put_in_place``.

    StorageError when ``size`` bytes do not fit, or what is in the body cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out.parent} cannot be made: {error.strerror}; choose another folder") from error
    try:
        free = shutil.disk_usage(out.parent).free
        if free < size + _SPARE_BYTES:
            raise StorageError(
                f"{out} will take {size} bytes, and {_SPARE_BYTES} to spare; {free} are free there: make room or "
                "choose another folder"
            )
        with partial_folder(out) as folder:
            yield folder
    except FileNotFoundError:  # of what is read: a run may remove an old tag meanwhile, as the caller explains
        raise
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {explain(error)}") from error


def require_vacant(out: Path, fingerprint: str | None) -> None:
    """StorageError when ``out`` holds anything but damaged weights of this fingerprint (any where it is yet unknown).

    A file that somebody put beside damaged weights would be lost with them.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        there = Weights.load(out)
    except RecordError as error:
        raise StorageError(
            f"{out} holds no finished result of consolidation ({error}): remove it or choose another folder"
        ) from None
    if fingerprint is None:
        return
    if fingerprint != there.fingerprint:
        raise StorageError(f"{out} holds other weights ({there.fingerprint[:12]}): remove it or choose another folder")
    if strangers := sorted({path.name for path in out.iterdir()} - {*there.files, MANIFEST}):
        raise StorageError(
            f"{out} holds damaged weights, and {strangers[0]} beside them: move that away, and try again"
        )


def put_in_place(folder: Path, out: Path) -> None:
    """Make ``folder`` the folder ``out``, durably; damaged weights that are there are moved aside."""
    if out.is_dir() and any(out.iterdir()):
        _log.warning("%s holds weights that are damaged or were changed: they were moved to %s", out, rename_aside(out))
    folder.rename(out)
    sync_folder(out.parent)

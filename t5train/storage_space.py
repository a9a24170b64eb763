"""Whether a folder can take what is to come, asked before anything expensive starts."""

import shutil
import tempfile
from pathlib import Path

from t5train.errors import StorageError


def require_space(root: Path, needed_bytes: int, what: str) -> None:
    """Make ``root`` if need be, and raise StorageError unless ``needed_bytes`` for ``what`` fit in it.

    A file is really created, because permissions do not tell of read-only and full file systems.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"\0")
    except OSError as error:
        raise StorageError(
            f"{root} cannot be written: {error.strerror}; choose another root (--root or --out)"
        ) from error
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise StorageError(
            f"{root} has {_gibibytes(free_bytes)} free, {what} needs {_gibibytes(needed_bytes)}: free "
            f"{_gibibytes(needed_bytes - free_bytes)}, or choose another root (--root or --out)"
        )


def _gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB ({size_bytes} bytes)"

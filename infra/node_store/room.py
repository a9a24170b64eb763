"""Room on a node's disk: asked for before anything is sent, and made of what was staged for earlier runs."""

import shutil
from pathlib import Path

from t5train.errors import StorageError

SPARE_BYTES = 256 << 20
"""Left free, for logs and for what else uses the disk."""


def require_room(scratch: Path, needed_bytes: int, what: str) -> None:
    """Raise StorageError unless that many bytes fit on the disk of the scratch folder."""
    free = shutil.disk_usage(scratch).free
    if free < needed_bytes + SPARE_BYTES:
        raise StorageError(
            f"{scratch} has {_gigabytes(free)} free, {what} needs {_gigabytes(needed_bytes + SPARE_BYTES)}: make room "
            "there (`t5-pretrain gc --free` removes what no run needs), or choose another storage.scratch"
        )


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"

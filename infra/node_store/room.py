"""Room on a node's disk: asked for before anything is sent, and made of what was staged for earlier runs."""

import shutil
from pathlib import Path

from infra.node_store.occupancy import remove_unused, staged_places
from t5train.errors import StorageError
from t5train.host_resources import format_bytes

SPARE_BYTES = 256 << 20
"""Left free, for logs and for what else uses the disk."""


def require_room(scratch: Path, needed_bytes: int, what: str, beside_bytes: int = 0) -> None:
    """Raise StorageError unless that many bytes fit on the disk of the scratch folder, and leave ``beside_bytes``.

    These are for what a run will write there. For that, folders that were staged and that no run uses are removed, the
    least recently used first, other than ``what``.
    """
    needed = needed_bytes + beside_bytes + SPARE_BYTES
    for place in staged_places(scratch):
        if shutil.disk_usage(scratch).free >= needed:
            return
        if place != what:
            remove_unused(scratch, place)
    if (free := shutil.disk_usage(scratch).free) < needed:
        also = f"with {format_bytes(beside_bytes)} for checkpoints " if beside_bytes else ""
        raise StorageError(
            f"{scratch} has {format_bytes(free)} free, {what} {also}needs {format_bytes(needed)}, and what else was "
            "staged there is in use: make room, or choose another storage.scratch"
        )

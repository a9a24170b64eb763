"""Why torch could not write a file: its writer says neither which file nor, for a full disk, what went wrong."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from t5train.errors import DiskFailed

_WRITER = "inline_container.cc"
_PROBE_BYTES = 1 << 20


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Within the block, a write of torch's to ``folder`` that fails raises an OSError with the path and the reason.

    The reason is found by writing there once more; DiskFailed where that succeeds.
    """
    try:
        yield
    except RuntimeError as error:
        if _WRITER not in str(error):
            raise
        try:
            _write(folder)
        except OSError as reason:
            raise OSError(reason.errno, reason.strerror, str(folder)) from error
        said = str(error).splitlines()[0]
        raise DiskFailed(
            f"{folder}: torch could not write a file of the checkpoint ({said}), although the folder can be written "
            "now: see `dmesg` for errors of the disk"
        ) from error


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())

"""Why torch could not write a file: its writer says neither which file nor, for a full disk, what went wrong."""

import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from t5train.errors import DiskFailed
from t5train.files.os_errors import naming

_WRITER = "inline_container.cc"
_TORCH = f"torch{os.sep}serialization.py"
_PROBE_BYTES = 1 << 20


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Within the block, a write of torch's to ``folder`` that fails raises an OSError with the path and the reason.

    Where torch hides the reason, it is found by writing there once more; DiskFailed where that succeeds.
    """
    try:
        with naming(folder):
            yield
    except RuntimeError as error:
        if _WRITER not in str(error) and not _is_raised_by_serialization(error):
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


def _is_raised_by_serialization(error: RuntimeError) -> bool:
    """Whether torch's archive writer raised it: its code in C++ has no frame of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.endswith(_TORCH)


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())

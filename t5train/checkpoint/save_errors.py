"""Explain why torch could not write a file. Its own error names neither the file nor, on a full disk, the cause."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from t5train.errors import DiskFailed
from t5train.files.atomic import try_writing
from t5train.files.os_errors import naming

_WRITER = "inline_container.cc"
_TORCH = f"torch{os.sep}serialization.py"
_PROBE_BYTES = 1 << 20


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """If torch fails to write to ``folder`` within the block, raise an OSError with the path and the reason.

    If torch's error hides the reason, a test file is written there to find it. Raises DiskFailed if that succeeds.
    """
    try:
        with naming(folder):
            yield
    except RuntimeError as error:
        if _WRITER not in str(error) and not _is_raised_by_serialization(error):
            raise
        try:
            try_writing(folder, _PROBE_BYTES)
        except OSError as reason:
            raise OSError(reason.errno, reason.strerror, str(folder)) from error
        said = str(error).splitlines()[0]
        raise DiskFailed(
            f"{folder}: torch could not write a checkpoint file ({said}), but the folder can be written now. "
            "Check `dmesg` for disk errors"
        ) from error


def _is_raised_by_serialization(error: RuntimeError) -> bool:
    """Whether torch's archive writer raised the error. Its C++ code has no frame in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.endswith(_TORCH)

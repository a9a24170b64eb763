"""The folder of a data stage on a disk that is full."""

import resource
from pathlib import Path

import pytest

from t5train.errors import StorageError
from t5train.files.output_folder import making


def test_a_claim_that_cannot_be_written_is_an_error_of_storage_with_the_path(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with (
            pytest.raises(StorageError, match=r"made cannot be written: .*/made/\.claim"),
            making(tmp_path / "made", "1"),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with making(tmp_path / "made", "2"):
        pass

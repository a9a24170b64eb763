import os
from pathlib import Path

import pytest

from t5train.errors import StorageError
from t5train.storage_space import require_space


def test_enough_space_makes_the_root_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    require_space(tmp_path / "a" / "root", 1, "a corpus")
    assert list((tmp_path / "a" / "root").iterdir()) == []


def test_too_little_space_is_told_in_bytes(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"{tmp_path} has .*bytes\) free, the run needs .*\({2**60} bytes\)"):
        require_space(tmp_path, 2**60, "the run")


def test_a_root_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written: Not a directory; choose another root"):
        require_space(tmp_path / "file" / "root", 1, "the run")


def test_a_root_where_no_file_can_be_created_is_refused() -> None:
    with pytest.raises(StorageError, match="/proc/self cannot be written"):
        require_space(Path("/proc/self"), 1, "the run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_root_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        require_space(tmp_path, 1, "the run")

"""A run that does not fit on this machine is refused before anything starts."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from t5train import host_resources
from t5train.errors import SpecError, StorageError
from t5train.host_resources import (
    available_host_memory_bytes,
    host_memory_bytes,
    require_host_memory,
    require_space,
    require_writable,
)


def test_too_little_host_memory_is_reported_with_both_sizes_and_the_setting() -> None:
    require_host_memory(host_memory_bytes(), "settings")
    with pytest.raises(SpecError, match=r"layout\.offload need 1,000,000\.0 GB .* this machine has [0-9.,]+ GB\. Keep"):
        require_host_memory(10**15, "layout.offload")


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None)])
def test_the_memory_limit_of_a_control_group_is_respected(
    text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(host_resources, "_GROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
    assert (host_memory_bytes() == limit) if limit else (host_memory_bytes() > 1 << 20)


@pytest.mark.parametrize(("prefix", "used"), [("", "memory.current"), ("total_", "memory.usage_in_bytes")])
def test_memory_that_can_still_be_used_is_what_the_control_group_leaves_and_its_cached_files(
    prefix: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, absent = tmp_path / "limit", tmp_path / "absent"
    monkeypatch.setattr(host_resources, "_GROUP_LIMITS", (absent, limit) if prefix else (limit, absent))
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    monkeypatch.setattr(host_resources, "_MEMORY", tmp_path / "meminfo")
    assert available_host_memory_bytes() == 2000 << 10
    limit.write_text("1000000\n")
    (tmp_path / used).write_text("900000\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{prefix}active_file 20000\n{prefix}inactive_file 3000\n")
    assert available_host_memory_bytes() == 123_000


def test_the_space_check_creates_the_root_and_leaves_it_empty(tmp_path: Path) -> None:
    require_space(tmp_path / "a" / "root", 1, "a corpus")
    assert list((tmp_path / "a" / "root").iterdir()) == []


@pytest.mark.parametrize(
    ("root", "size", "said"),
    [
        ("", 2**60, r"for the run: .* GB free, but 1,152,921,504\.6 GB are needed\. Free "),
        ("file/root", 1, "cannot be written: Not a directory; a part of the path is a file"),
        ("/proc/self", 1, "/proc/self cannot be written"),
    ],
)
def test_a_root_without_space_or_where_no_file_can_be_created_is_refused(
    tmp_path: Path, root: str, size: int, said: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=said):
        require_space(tmp_path / root, size, "the run")


def test_an_early_check_of_a_root_creates_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "root")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/root cannot be written: Not a directory; a part of the path"):
        require_writable(tmp_path / "file" / "root")


@pytest.mark.parametrize(("number", "is_refused"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EROFS, True)])
def test_an_early_check_of_a_root_ignores_only_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    monkeypatch.setattr(host_resources, "try_writing", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(StorageError, match="cannot be written") if is_refused else nullcontext():
        require_writable(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_root_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        require_space(tmp_path, 1, "the run")

"""Locks on files."""

import errno
import fcntl
import threading
import time
from pathlib import Path

import pytest

from t5train.errors import StorageError
from t5train.files.locks import file_system, is_locked, is_network_file_system, try_lock


def test_a_lock_has_one_holder_and_others_see_that_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with open(path, "wb") as first, open(path, "rb") as second:
        assert try_lock(first.fileno())
        assert is_locked(path)
        assert not try_lock(second.fileno())
    assert not is_locked(path)


def test_a_briefly_shared_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    looking, tried = threading.Event(), threading.Event()

    def look() -> None:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            looking.set()
            tried.wait(60)
            time.sleep(0.2)  # in which the other one waits

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()
    with open(path, "rb") as file:
        assert not try_lock(file.fileno())
        tried.set()
        assert try_lock(file.fileno(), seconds=60)
    thread.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_path_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def unsupported(_descriptor: object, _operation: int) -> None:
        raise OSError(number, "said by the kernel")

    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    named = rf"{path} cannot be locked: its file system \({file_system(path)}\).*said by the kernel.*Mount it with"
    with open(path, "rb") as file, pytest.raises(StorageError, match=named):
        try_lock(file.fileno())
    with pytest.raises(StorageError, match=named):
        is_locked(path)


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert not is_network_file_system(Path("/proc/self/status"))
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / /my\\040data rw - nfs4 server:/ rw\n"
        "3 2 0:7 / /my\\040data/local rw shared:1 - xfs /dev/sdb rw\n"
    )
    monkeypatch.setattr("t5train.files.locks._MOUNTS", table)
    found = [file_system(Path(path)) for path in ("/my data/x", "/my data/local/x", "/my datax", "/my data")]
    assert found == ["nfs4", "xfs", "ext4", "nfs4"]
    assert is_network_file_system(Path("/my data/x"))

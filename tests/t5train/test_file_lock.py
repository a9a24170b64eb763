"""Locks on files."""

import fcntl
import threading
import time
from pathlib import Path

from t5train.file_lock import is_locked, try_lock


def test_a_lock_is_had_once_and_seen_by_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with open(path, "wb") as first, open(path, "rb") as second:
        assert try_lock(first.fileno())
        assert is_locked(path)
        assert not try_lock(second.fileno())
    assert not is_locked(path)


def test_a_lock_that_is_shared_for_an_instant_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    looking = threading.Event()

    def look() -> None:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            looking.set()
            time.sleep(0.2)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()
    with open(path, "rb") as file:
        assert not try_lock(file.fileno())
        assert try_lock(file.fileno(), seconds=5)
    thread.join()

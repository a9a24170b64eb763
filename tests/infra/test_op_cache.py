import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.op_cache import clear_stale_locks

Start = Callable[..., subprocess.Popen[bytes]]
Until = Callable[..., None]

# What torch does while it compiles: the file is created exclusively and stays open.
COMPILE = "import sys, time; from torch.utils.file_baton import FileBaton\n"
COMPILE += "baton = FileBaton(sys.argv[1]); assert baton.try_acquire(); time.sleep(600)"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "deepspeed_shm_comm").mkdir()
    return tmp_path / "deepspeed_shm_comm" / "lock"


def test_the_lock_of_a_killed_compile_is_removed(
    tmp_path: Path, lock: Path, start: Start, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    compiling = start("-c", COMPILE, str(lock))
    until(lock.exists, 60)
    compiling.kill()
    compiling.wait()
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [lock]
    assert not lock.exists()
    assert str(lock) in caplog.text


def test_the_lock_of_a_live_compile_stays(tmp_path: Path, lock: Path, start: Start, until: Until) -> None:
    start("-c", COMPILE, str(lock))
    until(lock.exists, 60)
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    assert lock.exists()


def test_a_lock_that_its_compile_removes_between_two_looks_is_not_touched(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.touch()
    monkeypatch.setattr("time.sleep", lambda _seconds: lock.unlink())
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_another_users_lock_stays(tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    assert lock.exists()


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_torchs_default_cache_is_looked_into(tmp_path: Path, variable: str) -> None:
    cache = tmp_path / ".cache" if variable == "HOME" else tmp_path
    lock = cache / "torch_extensions" / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert clear_stale_locks({variable: str(tmp_path)}) == [lock]

import ast
import os
from pathlib import Path

import pytest

from infra.node import compiled_operators
from infra.node.compiled_operators import clear_stale_locks, missing, shared_locks
from tests.infra.conftest import Start, Until
from tests.support.small_disk import run_with_disk

# Does what torch does while it compiles: create the lock file exclusively and keep it open.
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
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    compiling.kill()
    compiling.wait()
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [lock]
    assert not lock.exists()
    assert str(lock) in caplog.text


def test_another_users_lock_stays_and_one_that_its_compile_removes_is_not_reported_as_removed(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
        assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    assert lock.exists()
    monkeypatch.setattr("time.sleep", lambda _seconds: lock.unlink())
    assert clear_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_a_lock_that_another_machine_may_hold_stays(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock.touch()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:50 / {str(tmp_path).replace(' ', chr(92) + '040')} rw,relatime shared:5 - nfs4 server:/home rw\n"
    )
    monkeypatch.setattr("t5train.files.locks._MOUNTS", mounts)
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert clear_stale_locks(environment) == []
    assert lock.exists()
    assert f"{lock} is on a disk that other machines may use" in caplog.text
    assert shared_locks(environment) == [lock]


def test_local_disks_are_distinguished_from_other_file_systems() -> None:
    assert compiled_operators.is_on_local_disk(Path("/dev/shm"))  # noqa: S108 - looked at
    assert not compiled_operators.is_on_local_disk(Path("/proc/self"))


def test_compiled_operators_are_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert missing(["deepspeed_shm_comm", "cpu_adam"], environment) == ["deepspeed_shm_comm"]


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from infra.node.compiled_operators import unwritable

folder = Path(sys.argv[1])
(folder / "ops" / "cpu_adam").mkdir(parents=True)
assert not unwritable({"TORCH_EXTENSIONS_DIR": str(folder / "ops")})
assert not unwritable({"TORCH_EXTENSIONS_DIR": str(folder / "not" / "there")})
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
print(unwritable({"TORCH_EXTENSIONS_DIR": str(folder / "ops")}))
print(unwritable({"TORCH_EXTENSIONS_DIR": str(folder / "not" / "there")}))
"""


def test_a_read_only_folder_of_operators_is_found_whether_it_exists_or_not(tmp_path: Path) -> None:
    ended = run_with_disk(tmp_path, "1m", READ_ONLY, str(tmp_path))
    existing, absent = map(ast.literal_eval, ended.stdout.splitlines())
    reason = "Read-only file system"
    assert existing == {f"{tmp_path}/ops": reason, f"{tmp_path}/ops/cpu_adam": reason}, ended.stderr
    assert absent == {str(tmp_path): reason}

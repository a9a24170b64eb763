import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.node.attempts.attempt import Attempt
from infra.node.attempts.run_lock import holder, ranks_lock, run_lock
from t5train.errors import RunLocked, StorageError
from tests.infra.conftest import Start, Until

HOLD = "import sys, time; from pathlib import Path; from infra.node.attempts.run_lock import {0}\n"
HOLD += "with {0}(Path(sys.argv[1])):\n (Path(sys.argv[1]) / 'held').touch(); time.sleep(600)"


def test_a_second_start_is_refused_with_the_holder_since_when_to_the_second_and_how_to_stop_it(
    tmp_path: Path, start: Start, until: Until
) -> None:
    holding = start("-c", HOLD.format("run_lock"), str(tmp_path / "run"))
    until((tmp_path / "run" / "held").exists)
    by = rf"process {holding.pid} on {re.escape(os.uname().nodename)} since [0-9-]{{10}} [0-9:]{{8}} UTC\. "
    with pytest.raises(RunLocked, match=f"{by}Wait until that process ends, or stop it with Ctrl-C or a plain `kill`"):
        run_lock(tmp_path / "run").__enter__()


def test_a_second_start_is_refused_within_one_process_too(tmp_path: Path) -> None:
    with run_lock(tmp_path), ThreadPoolExecutor(1) as pool, pytest.raises(RunLocked):
        pool.submit(lambda: run_lock(tmp_path).__enter__()).result()


def test_the_folder_of_a_run_is_private_and_a_released_run_can_be_locked_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with run_lock(run):
        assert holder(run)
        assert (run.stat().st_mode | (run / "lock").stat().st_mode) & 0o077 == 0
    assert holder(run) is None
    with run_lock(run):
        assert holder(run)


def test_a_new_head_waits_for_ranks_of_the_old_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    released_at = []

    def rank() -> None:
        with ranks_lock(tmp_path):
            locked.set()
            time.sleep(0.7)
            released_at.append(time.monotonic())

    locked = threading.Event()
    thread = threading.Thread(target=rank)
    thread.start()
    locked.wait()
    with caplog.at_level("INFO"), run_lock(tmp_path):
        assert time.monotonic() >= released_at[0]
    thread.join()
    assert "waiting up to 30 s for ranks" in caplog.text


def test_the_error_names_processes_of_ranks_that_still_run(this: Attempt, start_guard: Start, until: Until) -> None:
    guard = start_guard("import time; time.sleep(600)")
    until((this.folder / "rank-00000.pid").exists)
    with pytest.raises(RunLocked, match=rf"processes: .*\b{guard.pid}\b.*kill -9"):
        run_lock(this.folder.parent.parent, wait_seconds=0.3).__enter__()


def test_guards_may_start_while_the_head_holds_the_run(tmp_path: Path) -> None:
    with run_lock(tmp_path), ranks_lock(tmp_path), ranks_lock(tmp_path):
        pass


def test_the_lock_is_not_inherited_by_programs_the_head_starts(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("owner", "mode"), [(65534, 0o700), (0, 0o770), (0, 0o707)])
def test_a_run_folder_that_others_may_write_to_is_refused(tmp_path: Path, owner: int, mode: int) -> None:
    if owner != os.getuid() and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    os.chown(tmp_path / "run", owner or os.getuid(), -1)
    with pytest.raises(StorageError, match="choose another root"):
        run_lock(tmp_path / "run").__enter__()
    assert list((tmp_path / "run").iterdir()) == []

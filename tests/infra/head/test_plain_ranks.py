"""Plain ranks end together, with the reason of the first that failed, and with the process that started them."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.head import plain_ranks
from infra.head.plain_ranks import run_ranks
from t5train.errors import LaunchError, OutOfMemory
from tests.support.waiting import await_that

RANK = """
import os, sys, time
from pathlib import Path

folder, code = Path(sys.argv[1]), int(sys.argv[2])
rank = os.environ["RANK"]
(folder / f"new-{rank}").write_text(str(os.getpid()))
(folder / f"new-{rank}").rename(folder / f"pid-{rank}")
end = time.monotonic() + 300
while time.monotonic() < end and (rank == "0" or not code or not (folder / "pid-0").exists()):
    time.sleep(0.05)
print("why it failed")
sys.exit(code)
"""
HEAD = f"""
import sys
from pathlib import Path
from infra.head.plain_ranks import run_ranks

run_ranks(("-c", {RANK!r}, sys.argv[1], "0"), 2, None, Path(sys.argv[1]))
"""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (3, LaunchError, r"rank 1 ended with exit code 3\. The end of .*rank-1\.log:\nwhy it failed"),
        (75, OutOfMemory, "Use a smaller micro-batch"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(plain_ranks, "_GRACE_SECONDS", 0.1)
    with pytest.raises(error, match=said):
        run_ranks(("-c", RANK, str(tmp_path), str(code)), 2, None, tmp_path)
    assert not is_alive(int((tmp_path / "pid-0").read_text()))


def test_ranks_end_with_a_head_that_is_killed(tmp_path: Path, start: Callable[..., Any]) -> None:
    head = start("-c", HEAD, str(tmp_path))
    pids = [tmp_path / "pid-0", tmp_path / "pid-1"]
    await_that(lambda: all(path.exists() for path in pids))
    head.send_signal(signal.SIGKILL)
    head.wait()
    await_that(lambda: not any(is_alive(int(path.read_text())) for path in pids))

"""What has arrived of a wheel is used exactly once, and a lock holds only while its file is there."""

import fcntl
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.node.environments.installation_messages import Refusal, locked
from infra.node.environments.wheel_store import held_bytes

NAME, CONTENT = "first-1.0-py3-none-any.whl", b"0123456789"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize(
    ("part", "held", "whole"),
    [(CONTENT[:4], 4, False), (CONTENT, 10, True), (b"x" * 10, 0, False), (b"x" * 11, 0, False)],
    ids=["a part", "all, but not yet renamed", "all, but damaged", "too much"],
)
def test_what_an_interrupted_transfer_left_is_continued_completed_or_dropped(
    tmp_path: Path, part: bytes, held: int, whole: bool
) -> None:
    (tmp_path / DIGEST).mkdir()
    (tmp_path / DIGEST / f"{NAME}.part").write_bytes(part)
    assert held_bytes(tmp_path, NAME, len(CONTENT), DIGEST) == held
    assert (tmp_path / DIGEST / NAME).exists() == whole
    assert (tmp_path / DIGEST / f"{NAME}.part").exists() == (0 < held < len(CONTENT))


def test_who_waited_for_a_file_that_was_removed_does_not_hold_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    path.touch()

    def wait() -> None:
        with locked(path, "another host to make it"):
            pass

    wait()
    with open(path, "r+b") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = pool.submit(wait)
        while not _is_waited_for(path):
            time.sleep(0.01)
        path.unlink()
        path.touch()
        fcntl.flock(held, fcntl.LOCK_UN)
        with pytest.raises(Refusal, match="waited for another host to make it, which failed"):
            waiting.result(20)


def _is_waited_for(path: Path) -> bool:
    waits = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(f":{path.stat().st_ino} " in line for line in waits)

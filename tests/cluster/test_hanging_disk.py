"""The file system that stands in for NFS in the table of faults is like the folder that it shows, until it hangs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hanging_disk import DEVICE
from tests.support.waiting import await_that

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(not DEVICE.exists(), reason=f"{DEVICE} does not exist")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that shows ``tmp_path / "shown"`` what is in ``tmp_path / "source"``."""
    for name in ("source", "shown"):
        (tmp_path / name).mkdir()
    argv = [sys.executable, "-m", "tests.support.hanging_disk", tmp_path / "source", tmp_path / "shown"]
    process = subprocess.Popen(argv)
    await_that(lambda: os.path.ismount(tmp_path / "shown") or process.poll() is not None)
    yield process
    process.kill()
    process.wait()
    subprocess.run(["umount", "--lazy", tmp_path / "shown"], check=True)


@pytest.mark.usefixtures("disk")
def test_files_are_those_of_the_folder(tmp_path: Path) -> None:
    source, shown, content = tmp_path / "source", tmp_path / "shown", os.urandom(300_000)
    (shown / "a" / "b").mkdir(parents=True)
    (shown / "a" / "x").write_bytes(content)
    (shown / "a" / "x").rename(shown / "a" / "b" / "y")
    assert (source / "a" / "b" / "y").read_bytes() == (shown / "a" / "b" / "y").read_bytes() == content
    with open(shown / "a" / "b" / "y", "ab") as file:
        file.write(b"more")
        os.fsync(file.fileno())
    os.truncate(shown / "a" / "b" / "y", 3)
    os.link(shown / "a" / "b" / "y", shown / "z")
    (shown / "to-z").symlink_to("z")
    os.utime(shown / "z", ns=(1, 2))
    assert (source / "to-z").read_bytes() == content[:3]
    assert (shown / "z").stat()[:2] == (source / "z").stat()[:2]
    assert (source / "z").stat().st_mtime_ns == (shown / "z").stat().st_mtime_ns == 2
    (source / "a" / "b" / "y").unlink()
    (shown / "a" / "b").rmdir()
    assert sorted(path.name for path in shown.iterdir()) == ["a", "to-z", "z"]
    with pytest.raises(FileNotFoundError):
        (shown / "y").read_bytes()


def test_whoever_waits_for_a_disk_that_hangs_can_be_killed_and_others_go_on(
    tmp_path: Path, disk: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "source" / "x").write_text("content")
    with open(tmp_path / "shown" / "y", "wb") as written:
        argv = ["sh", "-c", 'read _; exec cat "$0"', tmp_path / "shown" / "x"]
        killed, other = (
            subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[written.fileno()]
            )
            for _ in range(2)
        )
    disk.send_signal(signal.SIGUSR1)
    await_that(lambda: "T (stopped)" in Path(f"/proc/{disk.pid}/status").read_text())
    for process in (killed, other):
        print(file=process.stdin, flush=True)
        await_that(lambda of=process: "request_wait" in Path(f"/proc/{of.pid}/wchan").read_text())
    killed.kill()
    assert killed.communicate(timeout=60)[0] == ""
    disk.send_signal(signal.SIGCONT)
    assert other.communicate(timeout=60)[0] == "content"

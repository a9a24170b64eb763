"""Staged folders are removed when disk space is needed: the least recently used first, and never one in use."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.node import node_folders
from infra.node.attempts import attempt
from infra.node.processes import ProcessIdentity
from infra.node.storage import disk_usage
from infra.node.storage.disk_usage import pin, remove_unused, require_disk_space, staging_lock, unpin, users
from t5train.errors import StorageError
from tests.support.simulated_nodes import RUN
from tests.support.small_disk import run_with_disk

HOLD = """
import sys, time
from pathlib import Path
from infra.node.storage.disk_usage import staging_lock
with staging_lock(Path(sys.argv[1]), "shards/held"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder with three staged folders that were last used in this order: old, held, new."""
    monkeypatch.setattr(node_folders, "PARENT", tmp_path)
    scratch = node_folders.node_folder() / "scratch"
    for age, name in ((30, "old"), (20, "held"), (10, "new")):
        (scratch / "shards" / name).mkdir(parents=True)
        (scratch / "shards" / name / "train.bin").write_bytes(bytes(1_000_000))
        with staging_lock(scratch, f"shards/{name}"):
            pass
        then = time.time() - age
        os.utime(scratch / "locks" / f"shards~{name}.lock", (then, then))
    return scratch


@pytest.fixture
def holder(scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is staging shards/held."""
    argv = [sys.executable, "-c", HOLD, str(scratch)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def left(scratch: Path) -> set[str]:
    return {path.name for path in (scratch / "shards").iterdir()}


@pytest.fixture
def disk(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with space for exactly three staged folders."""

    def free(_: Path) -> os.terminal_size:
        usage = type("Usage", (), {"free": disk_usage.SPARE_BYTES + 3_000_000 - 1_000_000 * len(left(scratch))})
        return usage()  # type: ignore[no-any-return]  # only this field is read

    monkeypatch.setattr(disk_usage.shutil, "disk_usage", free)


def test_the_least_recently_used_folders_are_removed_and_no_more_than_needed(scratch: Path, disk: None) -> None:
    require_disk_space(scratch, 1_000_000, "shards/next")
    assert left(scratch) == {"held", "new"}
    require_disk_space(scratch, 1_000_000, "shards/next", beside_bytes=1_000_000)
    assert left(scratch) == {"new"}


def test_folders_that_are_pinned_or_staged_are_kept(scratch: Path, disk: None, holder: subprocess.Popen[str]) -> None:
    pin(scratch, "shards/old", RUN)
    with pytest.raises(StorageError, match="in use"):
        require_disk_space(scratch, 3_000_000, "shards/next")
    assert left(scratch) == {"old", "held"}


def test_a_folder_is_staged_by_one_process_and_a_killed_one_does_not_block_it(
    scratch: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.node.storage.disk_usage._LOCK_WAIT_SECONDS", 0.2)
    with pytest.raises(StorageError, match=f"is being staged by process {holder.pid} since"), \
            staging_lock(scratch, "shards/held"):  # fmt: skip
        pass
    holder.kill()
    holder.wait()
    with staging_lock(scratch, "shards/held"):
        pass


def test_a_pin_prevents_removal_and_is_ignored_once_its_run_is_gone(scratch: Path) -> None:
    pin(scratch, "shards/old", RUN)
    pinned = scratch / "pins" / "shards~old" / RUN
    assert users(scratch, "shards/old") == [RUN]
    os.utime(pinned, (1, 1))
    assert users(scratch, "shards/old") == []
    this = attempt.begin(scratch.parent / "smoke", None, 60.0)
    own = replace(this, folder=node_folders.attempt_folder(this.run_id))
    own.folder.mkdir(mode=0o700)
    own.write()
    own.write_process("rank-00000", ProcessIdentity.of(os.getpid()), ProcessIdentity.of(os.getpid()))
    assert users(scratch, "shards/old") == [RUN], "its guard is alive"
    pinned.write_text("of another boot")
    assert users(scratch, "shards/old") == []
    pin(scratch, "shards/old", RUN)
    assert not remove_unused(scratch, "shards/old")
    unpin(scratch, RUN)
    assert remove_unused(scratch, "shards/old")
    assert disk_usage.staged_paths(scratch) == ["shards/held", "shards/new"]


# Uses up the inodes of a disk, and prints what each check says about it.
WITHOUT_INODES = """
import hashlib, sys
from pathlib import Path
from infra.node.inspection.hardware import _folder
from infra.node.storage.disk_usage import require_disk_space
from infra.node.storage.file_channel import Wanted, Watcher
from infra.node.storage.pull import pull
from t5train.errors import StorageError
from t5train.files.os_errors import explain
from t5train.host_resources import require_free_space

folder = Path(sys.argv[1])
(folder / "shards").mkdir()
try:
    for number in range(100):
        (folder / str(number)).touch()
except OSError as error:
    print("explain:", explain(error))
try:
    require_disk_space(folder, 0, "shards/x", needed_inodes=5)
except StorageError as error:
    print("staging:", error)
try:
    require_free_space(folder, 0, "the run")
except StorageError as error:
    print("root:", error)
try:
    wanted = Wanted("x", 1, hashlib.sha256(b"x").hexdigest())
    pull(lambda *_: iter([b"x"]), [wanted], folder, Watcher())
except StorageError as error:
    print("pull:", error)
print("preflight:", _folder(lambda: folder).error)
"""


def test_a_disk_without_inodes_is_not_said_to_lack_space(tmp_path: Path) -> None:
    ended = run_with_disk(tmp_path, "400m,nr_inodes=20", WITHOUT_INODES, str(tmp_path))
    said = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    assert said.keys() == {"explain", "staging", "root", "pull", "preflight"}, ended.stderr
    assert "No space left on device; the disk has no free inodes" in said["explain"]
    assert said["staging"].startswith(f"{tmp_path} has 0 free inodes, but shards/x and checkpoints need 1,005, one for")
    assert said["root"].startswith(f"too few inodes for the run: the disk of {tmp_path} has 0 free, but 100 are needed")
    assert said["pull"].endswith("remove files there, or use another folder. Then start again")
    assert "cannot be written: No space left on device; the disk has no free inodes" in said["preflight"]

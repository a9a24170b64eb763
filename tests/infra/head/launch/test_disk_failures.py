"""If a rank's disk fails, the error begins with the rank, its host and the path, and names a remedy."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.head.launch.rank_evidence import evidence_of
from infra.head.launch.verdict import verdict
from infra.node.attempts import attempt, guard_failure
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from t5train.errors import DiskFailed, DiskFull, StorageError, T5TrainError
from t5train.files import error_report
from t5train.files.run_folder import ATTEMPT_SPEC
from tests.support.small_disk import run_with_disk

# Starts a guard on a disk that has just become read-only, then finds the cause as the head does.
GUARD = """
import os, subprocess, sys
from pathlib import Path
from infra.node.attempts import attempt
from infra.head.launch.rank_evidence import evidence_of
from infra.head.launch.verdict import verdict
from infra.node.processes import ProcessIdentity

folder, log = Path(sys.argv[1]), Path(sys.argv[2])
this = attempt.begin(folder / "run", ProcessIdentity.of(os.getpid()))
this.log("launcher").symlink_to(log)
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
argv = [sys.executable, "-m", "infra.node.attempts.process_guard", str(this.folder), "true"]
with open(log, "wb") as output:
    ended = subprocess.run(argv, env=os.environ | {"RANK": "0", "T5_RUN_ID": this.run_id}, stderr=output)
error = verdict(evidence_of(this, 1))
print(ended.returncode, type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("act", "kind", "start"),
    [
        # Address 0 is not mapped: the kernel returns EIO, as for a bad sector.
        (lambda: Path("/proc/self/mem").read_bytes(), DiskFailed, "/proc/self/mem: Input/output error; "),
        (lambda: Path("/dev/full").write_bytes(b"x"), DiskFull, "/dev/full: No space left on device; "),
        (lambda: Path("/proc/self/mem/x").read_bytes(), StorageError, "/proc/self/mem/x: Not a directory; "),
    ],
)
def test_an_error_of_a_ranks_disk_names_rank_host_path_and_remedy(
    over_hosts: Attempt, act: Callable[[], object], kind: type[T5TrainError], start: str
) -> None:
    with pytest.raises(OSError, match="Errno") as raised:
        act()
    error_report.report(over_hosts.rank_files("rank-00001"), raised.value)
    error = verdict(evidence_of(over_hosts, 2))
    assert type(error) is kind
    assert error.retryable == (kind is DiskFailed)
    assert str(error).startswith(f"rank 1 of 2 on node2: {start}")
    assert str(error).endswith(". To train without node2, use --exclude node2")
    assert error.hosts == ("node2",)


@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize(("node_local", "hosts"), [(False, ()), (True, ("node2",))])
def test_no_host_is_blamed_for_a_full_shared_disk(
    tmp_path: Path, node_local: bool, hosts: tuple[str, ...], is_reported: bool
) -> None:
    this = attempt.begin(tmp_path / "runs" / "r", None, lease_seconds=60.0, hosts={"node1": (0,), "node2": (0,)})
    (this.folder / ATTEMPT_SPEC).write_text(json.dumps({"node_local": node_local}))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "runs" / "r" / "checkpoints" / "x"))
    if is_reported:
        error_report.report(this.rank_files("rank-00001"), full)
    else:  # as with an error in a library's thread
        this.log("rank-00001").write_text(f"OSError: {full}\n")
        this.write_exit(ExitRecord("rank-00001", 1, Cause.EXITED, "exited", "then", "then", "node2"))
    error = verdict(evidence_of(this, 2))
    assert type(error) is DiskFull
    assert str(error).startswith("rank 1 of 2 on node2")
    assert ("--exclude" in str(error)) == (node_local and is_reported)
    assert error.hosts == hosts


def test_a_guard_that_cannot_write_reports_it_in_the_launchers_log(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    ended = run_with_disk(folder, "8m", GUARD, str(folder), str(tmp_path / "launcher.log"))
    code, kind, text = ended.stdout.split(" ", 2)
    assert (code, kind) == ("1", "DiskFailed"), ended.stderr
    assert text.startswith(f"rank 0 of 1: {folder}/run/attempts/0001/")
    assert "Read-only file system" in text


def test_a_guards_error_is_found_behind_the_prefix_of_pdsh(tmp_path: Path) -> None:
    line = guard_failure.line("rank-00003", OSError(5, os.strerror(5), "/nodes/x"))
    (tmp_path / "launcher.log").write_text(f"node1: step 7\nnode1: {line}node1: bye\n")
    (found,) = guard_failure.read(tmp_path / "launcher.log").items()
    assert found[0] == "rank-00003"
    assert type(found[1]) is DiskFailed
    assert str(found[1]).startswith("/nodes/x: Input/output error; ")
    assert guard_failure.read(tmp_path / "absent.log") == {}

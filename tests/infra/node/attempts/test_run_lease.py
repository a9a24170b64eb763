"""Heads on two machines whose locks do not exclude each other, because flock is local to each client (as on some NFS).

A process with another boot id, and with a preloaded library in which every flock succeeds, plays the second machine.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra.node.attempts import run_lease
from infra.node.attempts.run_lease import RunLease
from infra.node.attempts.run_lock import holder, run_lock
from t5train.errors import RunLocked, StorageError
from t5train.files import ownership
from tests.infra.conftest import Start, Until
from tests.support.held_runs import is_lost

Variables = dict[str, str]
ELSEWHERE = """
import sys, time
from pathlib import Path
from infra.node import processes
processes.boot_id = lambda: "another machine"
from infra.node.attempts import run_lease
from infra.node.attempts.run_lock import holder, run_lock
run_lease.LEASE_SECONDS = float(sys.argv[2])
run_lease._RENEW_SECONDS = 0.2
run = Path(sys.argv[1])
"""
HOLD = ELSEWHERE + "with run_lock(run) as lease:\n (run / 'held').touch()\n sys.stdin.read()\n lease.require_kept()\n"


@pytest.fixture
def local_flock(tmp_path: Path) -> Variables:
    """Environment variables with which every flock of a process succeeds, even if another process holds the lock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    source, library = tmp_path / "flock.c", tmp_path / "flock.so"
    source.write_text("int flock(int descriptor, int operation) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "_RENEW_SECONDS", 0.2)
    monkeypatch.setattr(run_lease, "_GLANCE_SECONDS", 3.0)
    monkeypatch.setattr(run_lease, "LEASE_SECONDS", 2.0)


def run_elsewhere(local_flock: Variables, code: str, run: Path, lease: float) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", ELSEWHERE + code, str(run), str(lease)]
    return subprocess.run(argv, env=os.environ | local_flock, capture_output=True, text=True, check=False, timeout=300)


def test_a_head_on_another_machine_is_refused_with_the_name_of_the_holder(
    tmp_path: Path, local_flock: Variables
) -> None:
    run = tmp_path / "run"
    with run_lock(run) as lease:
        refused = run_elsewhere(local_flock, "with run_lock(run): print('in')", run, 20)
        seen = run_elsewhere(local_flock, "print(holder(run))", run, 20)
        lease.require_kept()
    assert f"in use by process {os.getpid()} on {os.uname().nodename} since" in refused.stderr
    assert "in" not in refused.stdout.split()
    assert seen.stdout.startswith(f"process {os.getpid()} on "), "status and gc see a holder on another machine, too"
    free = run_elsewhere(local_flock, "print(holder(run))\nwith run_lock(run): print('in')", run, 600)
    assert free.stdout.split() == ["None", "in"], free.stderr  # before the time limit, half of the lease


def test_the_run_of_a_dead_head_on_another_machine_is_taken_over_only_after_the_lease(
    tmp_path: Path,
    start: Start,
    until: Until,
    local_flock: Variables,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run_lease, "_GLANCE_SECONDS", 0.5)
    monkeypatch.setattr(run_lease, "LEASE_SECONDS", 1.0)
    dead = start("-c", HOLD.replace("sys.stdin.read()", "time.sleep(600)"), str(tmp_path), "2", **local_flock)
    until((tmp_path / "held").exists)
    dead.kill()
    dead.wait()
    assert holder(tmp_path) is None
    began = time.monotonic()
    with run_lock(tmp_path):
        assert time.monotonic() - began >= run_lease.LEASE_SECONDS
    assert f"is taken over: process {dead.pid} on" in caplog.text


def test_a_restart_on_the_same_machine_does_not_wait_for_a_killed_heads_lease(
    tmp_path: Path, start: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "LEASE_SECONDS", 600.0)
    here = HOLD.replace('processes.boot_id = lambda: "another machine"', "")
    killed = start("-c", here.replace("sys.stdin.read()", "time.sleep(9)"), str(tmp_path), "600")
    until((tmp_path / "held").exists)
    killed.kill()
    killed.wait()
    with run_lock(tmp_path):
        pass


def test_a_head_notices_that_another_head_has_taken_over_its_run(tmp_path: Path, until: Until) -> None:
    with run_lock(tmp_path) as lease:
        record = json.loads((tmp_path / "holder.json").read_text())
        another = run_lease.Holder(host="far", boot_id="another machine", since="then")
        (tmp_path / "holder.json").write_text(json.dumps(vars(another)).ljust(1024))
        until(lambda: is_lost(lease))
        with pytest.raises(RunLocked, match=r"was taken over by process .* on far since then"):
            lease.require_kept()
    left = json.loads((tmp_path / "holder.json").read_text())
    assert left["nonce"] == another.nonce != record["nonce"], "the record of the other head is left alone"
    assert not left["is_released"]


def test_a_stopped_head_loses_the_run_and_gets_an_error_when_it_resumes(
    tmp_path: Path, start: Start, until: Until, local_flock: Variables
) -> None:
    until_lost = HOLD.replace("sys.stdin.read()", "\n while True: lease.require_kept(); time.sleep(0.05)\n")
    stopped = start("-c", until_lost, str(tmp_path), "2", **local_flock)
    until((tmp_path / "held").exists)
    stopped.send_signal(signal.SIGSTOP)
    with run_lock(tmp_path) as lease:
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(300) == 1
        lease.require_kept()
    assert f"was taken over by process {os.getpid()} on" in (tmp_path / "output.txt").read_text()


def test_a_write_that_hangs_when_the_run_is_released_keeps_other_heads_here_out_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, hangs, answers = RunLease._write, threading.Event(), threading.Event()

    def hanging_write(lease: RunLease, how: int) -> None:
        hangs.set()
        assert answers.wait(20)
        write(lease, how)

    monkeypatch.setattr(ownership, "_END_SECONDS", 0.01)
    with run_lock(tmp_path) as lease:
        monkeypatch.setattr(RunLease, "_write", hanging_write)
        assert hangs.wait(20)
    with pytest.raises(RunLocked, match="is in use by process"):
        run_lock(tmp_path).__enter__()
    answers.set()
    lease._thread.join(20)
    with run_lock(tmp_path) as following:
        following.renew()


def test_the_holder_record_has_no_field_that_earlier_versions_do_not_know(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        record = (tmp_path / "holder.json").read_bytes()
    names = ["host", "boot_id", "pid", "since", "nonce", "counter", "is_released"]
    assert (list(json.loads(record)), len(record)) == (names, 1024), "they take any other record for no holder"


def test_a_run_whose_holder_record_cannot_be_read_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "holder.json").mkdir()
    with pytest.raises(StorageError, match=r"holder\.json cannot be read .*unknown whether another machine is using"):
        run_lock(tmp_path).__enter__()

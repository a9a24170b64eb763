import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause
from infra.node.attempts.watchdog import Watchdog
from infra.node.processes import Activity, ProcessIdentity
from t5train.files import heartbeat
from t5train.files.heartbeat import Beat
from tests.infra.conftest import Start, Survivors, Until
from tests.support.guarded_ranks import HANG_SECONDS, SLEEP, STUBBORN, guard_arguments, recorded_exit

LOOK_SECONDS = 1.5
"""In this time a guard looks at least once whether its rank must be ended."""

SIGNALLED_AT_STARTUP = """
import os, signal, sys
from infra.node.attempts import process_guard
moment, read, run = sys.argv.pop(1), process_guard.attempt.read, process_guard._start
def signalled(when):
    if moment == when:
        os.kill(os.getpid(), signal.SIGTERM)
def read_then(*arguments):
    signalled("before")
    return read(*arguments)
def start_then(*arguments):
    signalled("just before")
    child = run(*arguments)
    signalled("after")
    return child
process_guard.attempt.read, process_guard._start = read_then, start_then
process_guard.main()
"""
"""A guard that gets SIGTERM at a moment of its startup."""
HANGING = """
import faulthandler, signal, time
from t5train.files.heartbeat import Heartbeat
faulthandler.register(signal.SIGUSR1)
def hangs_here():
    time.sleep(600)
with Heartbeat.of_rank({"start_seconds": 60, "save_seconds": 1.0}) as heart:
    print("ready", flush=True)
    heart.enter("save", 7)
    hangs_here()
"""


def guarded(start: Start, this: Attempt, program: str, **environment: str) -> subprocess.Popen[bytes]:
    return start(*guard_arguments(this, program), **{"RANK": "0", "T5_RUN_ID": this.run_id, **environment})


def last_renewed(this: Attempt, seconds_ago: float) -> None:
    """Let the lease be as if the head had renewed it that long ago."""
    (this.folder / head_lease.LEASE).write_text(f"{time.monotonic() - seconds_ago:<24.3f}")


def rank_pid(this: Attempt) -> int:
    return int(json.loads((this.folder / "rank-00000.pid").read_text())["process"]["pid"])


def test_the_output_and_exit_code_of_a_rank_are_recorded(this: Attempt, start_guard: Start) -> None:
    guard = start_guard("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert guard.wait(HANG_SECONDS) == 1
    assert sorted(this.log("rank-00000").read_text().split()) == ["err", "out"]
    record = this.exit_record("rank-00000")
    assert record is not None
    assert (record.returncode, record.reason, record.succeeded) == (7, "exited", False)
    assert record.started_at < record.ended_at


def test_a_killed_rank_is_recorded_with_its_signal(this: Attempt, running: Start, survivors: Survivors) -> None:
    guard = running(STUBBORN)
    os.kill(rank_pid(this), signal.SIGKILL)
    assert guard.wait(HANG_SECONDS) == 1
    assert str(this.exit_record("rank-00000")) == "was killed by SIGKILL"
    assert survivors(this.run_id) == set()  # its forked child was ended too


def test_killing_the_guard_kills_its_rank(this: Attempt, running: Start, until: Until, survivors: Survivors) -> None:
    guard = running("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEP)
    guard.kill()
    guard.wait()
    until(lambda: not survivors(this.run_id))
    assert this.exit_record("rank-00000") is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_guard_that_gets_sigint_or_sighup_kills_its_rank_and_records_the_signal(
    this: Attempt, running: Start, number: signal.Signals, survivors: Survivors
) -> None:
    guard = running(SLEEP)
    guard.send_signal(number)
    assert guard.wait(HANG_SECONDS) == 1
    assert survivors(this.run_id) == set()
    assert recorded_exit(this)[1:] == (number.name, -signal.SIGKILL)


def test_a_rank_stopped_by_sigstop_is_detected_and_killed(this: Attempt, running: Start, survivors: Survivors) -> None:
    replace(this, beat_seconds=1.0).write()
    guard = running(SLEEP)
    os.kill(rank_pid(this), signal.SIGSTOP)
    assert guard.wait(HANG_SECONDS) == 1
    assert survivors(this.run_id) == set()
    cause, reason, _ = recorded_exit(this)
    assert cause == Cause.BEAT
    assert reason.startswith("no sign of life for 2 s")


def test_a_rank_without_a_first_heartbeat_is_detected(this: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.node.attempts.watchdog._FIRST_BEAT_SECONDS", 0.0)
    launcher, rank = Watchdog(this, "launcher", os.getpid(), None), Watchdog(this, "rank-00000", os.getpid(), None)
    assert launcher.check() is None
    verdict = rank.check()
    assert verdict is not None
    assert (verdict[0], verdict[1][:24]) == (Cause.BEAT, "no first sign of life af")
    heartbeat.write(heartbeat.beat_file(this.rank_files("rank-00000")), Beat(0.0, "start", time.monotonic(), 600.0, 0))
    assert rank.check() is None


@pytest.mark.parametrize("computes", [False, True])
def test_a_rank_without_heartbeats_is_ended_if_it_sleeps_but_not_if_it_computes(
    this: Attempt, monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    monkeypatch.setattr("infra.node.attempts.watchdog.processes.activity", lambda _pid: Activity("S", next(ticks)))
    ticks = count(step=int(computes))
    beat = Beat(0.0, "step", time.monotonic(), 600.0, 7)
    heartbeat.write(heartbeat.beat_file(this.rank_files("rank-00000")), beat)
    watchdog = Watchdog(replace(this, beat_seconds=3.0), "rank-00000", os.getpid(), None)
    verdicts = [watchdog.check() for _ in range(5)]  # as the guard does, once a second
    assert verdicts[:4] == [None] * 4
    assert computes == (verdicts[4] is None)
    assert computes or verdicts[4] == (Cause.BEAT, "no sign of life for 4 s: the process is stopped or hangs")


def test_a_rank_is_ended_if_it_trains_while_its_checkpoint_exceeds_the_deadline_of_a_save(this: Attempt) -> None:
    watchdog, now = Watchdog(this, "rank-00000", os.getpid(), None), time.monotonic()
    heartbeat.write(heartbeat.beat_file(this.rank_files("rank-00000")), Beat(0.0, "step", now, 60.0, 8, 7, now - 9, 8))
    assert watchdog.check() == (Cause.SAVE, "writing the checkpoint of step 7 took 9 s; its deadline is 8 s")


def test_a_rank_that_exceeds_a_phase_deadline_is_ended_and_its_log_shows_where_it_hangs(
    this: Attempt, running: Start
) -> None:
    assert running(HANGING).wait(HANG_SECONDS) == 1
    cause, reason, _ = recorded_exit(this)
    assert cause == Cause.PHASE
    assert reason.startswith("phase 'save' of step 7 took ")
    assert reason.endswith("its deadline is 1 s")
    assert "in hangs_here" in this.log("rank-00000").read_text()


@pytest.fixture
def leased(tmp_path: Path) -> Attempt:
    """An attempt over several hosts, as one host sees it."""
    this = attempt.begin(tmp_path / "run", None, lease_seconds=600.0)
    (this.folder / "environment.json").write_text(json.dumps({"GIVEN": "by the head", "T5_RUN_ID": this.run_id}))
    head_lease.begin(this.folder)
    return this


def test_a_rank_runs_until_its_lease_is_no_longer_renewed(
    leased: Attempt, start: Start, until: Until, survivors: Survivors
) -> None:
    guard = guarded(start, leased, SLEEP)
    until((leased.folder / "rank-00000.pid").exists)
    last_renewed(leased, seconds_ago=300.0)
    head_lease.renew(leased.folder)
    assert head_lease.age_seconds(leased.folder) < 200
    time.sleep(LOOK_SECONDS)
    assert guard.poll() is None
    last_renewed(leased, seconds_ago=601.0)
    assert guard.wait(HANG_SECONDS) == 1
    cause, reason, _ = recorded_exit(leased)
    assert cause == Cause.HEAD
    assert reason.startswith("no message from the head for 60")
    assert survivors(leased.run_id) == set()


def test_a_launcher_over_hosts_outlives_its_head_but_ends_when_its_lease_expires(
    leased: Attempt, start: Start, until: Until
) -> None:
    argv = guard_arguments(leased, SLEEP, "--launcher")
    head = start("-c", f"import subprocess, sys; subprocess.run([sys.executable, *{argv!r}])")
    until((leased.folder / "launcher.pid").exists)
    head.kill()
    head.wait()
    time.sleep(LOOK_SECONDS)
    assert leased.exit_record("launcher") is None
    last_renewed(leased, seconds_ago=601.0)
    until(lambda: leased.exit_record("launcher"))
    cause, reason, _ = recorded_exit(leased, "launcher")
    assert cause == Cause.HEAD
    assert reason.startswith("no message from the head for 60")


def test_a_rank_whose_lease_was_removed_is_killed_at_once_and_cannot_be_started_again(
    leased: Attempt, start: Start, until: Until
) -> None:
    guard = guarded(start, leased, STUBBORN)
    until(lambda: leased.log("rank-00000").exists() and b"ready" in leased.log("rank-00000").read_bytes())
    (leased.folder / head_lease.LEASE).unlink()
    guard.terminate()
    assert guard.wait(HANG_SECONDS) == 1
    # At once: otherwise the reason would be SIGTERM, after which the guard waits for the rank, or the age of the lease.
    assert recorded_exit(leased)[:2] == (Cause.REQUESTED, "the head ended the run")
    again = guarded(start, leased, SLEEP)
    assert again.wait(HANG_SECONDS) == 1
    assert recorded_exit(leased)[0] == Cause.REFUSED


def test_a_rank_over_hosts_gets_variables_of_the_head_and_of_its_own_machine(leased: Attempt, start: Start) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    numbers = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "MASTER_PORT": "29500"}
    assert start(*guard_arguments(leased, program), **numbers, HOME="/home/here", STRAY="1").wait(HANG_SECONDS) == 0
    seen = json.loads(leased.log("rank-00003").read_text())
    expected = {"GIVEN": "by the head", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    assert seen.items() >= {**expected, "HOME": "/home/here", "T5_RANK_FILES": f"{leased.folder}/rank-00003"}.items()
    assert "STRAY" not in seen


@pytest.mark.parametrize("own_group", ["", "os.setpgid(0, 0), "])  # as ninja starts compilers
def test_child_processes_that_a_rank_leaves_behind_are_ended(
    this: Attempt, start_guard: Start, survivors: Survivors, own_group: str
) -> None:
    program = f"import os, time; os.fork() or ({own_group}time.sleep(600)); time.sleep(0.5)"
    assert start_guard(program).wait(HANG_SECONDS) == 0
    assert survivors(this.run_id) == set()
    record = this.exit_record("rank-00000")
    assert record is not None
    assert record.succeeded


@pytest.mark.parametrize("moment", ["before", "just before", "after"])
def test_no_signal_during_startup_is_lost(this: Attempt, start: Start, moment: str, survivors: Survivors) -> None:
    startup = ["-c", SIGNALLED_AT_STARTUP, moment, *guard_arguments(this, SLEEP)[2:]]
    assert start(*startup, RANK="0", T5_RUN_ID=this.run_id).wait(HANG_SECONDS) == 1
    assert survivors(this.run_id) == set()
    assert recorded_exit(this)[:2] == (Cause.REQUESTED, "SIGTERM")


def test_the_rank_ends_when_the_head_is_killed(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors
) -> None:
    head = start("-c", SLEEP)
    this = attempt.begin(tmp_path / "run", ProcessIdentity.of(head.pid))
    guard = guarded(start, this, SLEEP)
    until((this.folder / "rank-00000.pid").exists)
    head.kill()  # and not reaped: it counts as dead although it is a zombie
    assert guard.wait(HANG_SECONDS) == 1
    assert survivors(this.run_id) == set()
    assert str(this.exit_record("rank-00000")) == "was ended by its guard (the head died)"


def test_the_rank_ends_when_the_guards_parent_is_killed(
    this: Attempt, start: Start, until: Until, survivors: Survivors
) -> None:
    guard = [sys.executable, *guard_arguments(this, SLEEP)]
    parent = start("-c", f"import subprocess; subprocess.run({guard})", RANK="0", T5_RUN_ID=this.run_id)
    until((this.folder / "rank-00000.pid").exists)
    parent.kill()
    parent.wait()
    until(lambda: not survivors(this.run_id))
    assert str(this.exit_record("rank-00000")) == "was ended by its guard (the guard's parent process died)"


@pytest.mark.parametrize("ticks", [-1, 1])
def test_no_rank_starts_if_the_heads_pid_belongs_to_another_process(tmp_path: Path, start: Start, ticks: int) -> None:
    alive = ProcessIdentity.of(os.getpid())
    this = attempt.begin(tmp_path / "run", ProcessIdentity(alive.pid, alive.start_time + ticks))
    assert guarded(start, this, SLEEP).wait(HANG_SECONDS) == 1
    assert not this.log("rank-00000").exists()
    assert recorded_exit(this)[2] is None


def test_the_rank_itself_holds_the_ranks_lock_until_it_is_gone(this: Attempt, running: Start) -> None:
    guard, path = running(SLEEP), this.folder.parent.parent / "ranks.lock"
    assert path in [file.readlink() for file in Path(f"/proc/{rank_pid(this)}/fd").iterdir()]
    with open(path) as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        guard.terminate()
        guard.wait(HANG_SECONDS)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_rank_sees_the_devices_that_its_user_chose(this: Attempt, start: Start) -> None:
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    devices = {"CUDA_VISIBLE_DEVICES": "0,1", "T5_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    guarded(start, this, program, **devices).wait(HANG_SECONDS)
    assert this.log("rank-00000").read_text() == "GPU-a,GPU-b\n"

"""Ranks that are told to stop get time to save, and complete a save whatever happens to the head."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.launch.rank_evidence import evidence_of
from infra.head.launch.verdict import verdict
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt, now
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.process_guard import stopping_attempts
from infra.node.attempts.rank_environment import ENVIRONMENT
from infra.node.attempts.watchdog import Watchdog
from infra.node.processes import ProcessIdentity
from t5train.errors import RankKilled
from t5train.files import heartbeat
from t5train.files.heartbeat import Beat
from tests.infra.conftest import Start, Survivors, Until
from tests.support.guarded_ranks import (
    HANG_SECONDS,
    SAVING_SLOWLY,
    SLEEP,
    STUBBORN,
    end_saves,
    guard_arguments,
    recorded_exit,
    saves,
)

SAVE = "(time.sleep(1), print('saved', flush=True), sys.exit(1))"
SAVING = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {SAVE}); {SLEEP}"


def test_sigterm_to_a_guard_gives_its_rank_time_to_save(this: Attempt, running: Start) -> None:
    guard = running(SAVING)
    guard.terminate()
    assert guard.wait(HANG_SECONDS) == 1
    assert this.log("rank-00000").read_text().endswith("saved\n")
    assert recorded_exit(this) == (Cause.REQUESTED, "SIGTERM", 1)


def test_a_rank_that_is_killed_while_it_saves_has_failed_and_its_peers_wait_for_it_no_longer(
    this: Attempt, running: Start
) -> None:
    guard = running(SAVING.replace("time.sleep(1)", "os.kill(os.getpid(), signal.SIGKILL)").replace("sys,", "os, sys,"))
    guard.terminate()
    assert guard.wait(HANG_SECONDS) == 1
    assert recorded_exit(this) == (Cause.EXITED, "exited", -signal.SIGKILL)
    assert this.failed_peer("rank-00001") == "rank-00000"
    assert isinstance(verdict(evidence_of(this, 2)), RankKilled), "not Preempted"


def test_a_rank_still_running_after_the_grace_period_is_killed_with_its_children(
    this: Attempt, running: Start, survivors: Survivors
) -> None:
    replace(this, grace_seconds=1.0).write()
    guard = running(STUBBORN)
    guard.terminate()
    assert guard.wait(HANG_SECONDS) == 1
    assert survivors(this.run_id) == set()
    assert recorded_exit(this) == (Cause.REQUESTED, "SIGTERM; it was still running after 1 s", -signal.SIGKILL)


@pytest.mark.parametrize("trains_on", [False, True])
def test_a_save_that_began_within_the_grace_period_is_completed(
    this: Attempt, monkeypatch: pytest.MonkeyPatch, trains_on: bool
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)  # the rank begins to save
    watchdog = Watchdog(replace(this, grace_seconds=0.0), "rank-00000", os.getpid(), None)
    beat_file = heartbeat.beat_file(this.rank_files("rank-00000"))
    saving = Beat(0.0, "save", time.monotonic(), 600.0, 7)
    if trains_on:
        saving = Beat(0.0, "step", time.monotonic(), 600.0, 8, 7, time.monotonic(), 600.0)
    heartbeat.write(beat_file, saving)
    assert watchdog.handle_signals(bytes([signal.SIGTERM])) is None
    assert watchdog.check() is None
    heartbeat.write(beat_file, Beat(0.0, "step", time.monotonic(), 600.0, 8))
    assert watchdog.check() == (Cause.REQUESTED, "SIGTERM; it was still running after 0 s")


@pytest.mark.parametrize(
    ("lost", "is_ordered", "log"),
    [*((lost, True, "ready\nsaved\n") for lost in ("head", "parent", "lease")), ("head", False, "ready\n")],
)
def test_a_save_that_the_head_ordered_is_completed_without_the_head(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors, lost: str, is_ordered: bool, log: str
) -> None:
    head, is_over_hosts = start("-c", SLEEP), lost == "lease"
    identity, lease_seconds = (None, 60.0) if is_over_hosts else (ProcessIdentity.of(head.pid), None)
    this = attempt.begin(tmp_path / "run", identity, lease_seconds)
    (this.folder / ENVIRONMENT).write_text(json.dumps({"T5_RUN_ID": this.run_id}))
    if is_over_hosts:
        head_lease.begin(this.folder)
    guarding = f"import subprocess, sys; subprocess.run([sys.executable, *{guard_arguments(this, SAVING_SLOWLY)!r}])"
    parent = start("-c", guarding, RANK="0", T5_RUN_ID=this.run_id)
    until(lambda: this.log("rank-00000").exists() and b"ready" in this.log("rank-00000").read_bytes())
    if is_ordered:
        this.order_stop()
    assert (this.folder in stopping_attempts()) == is_ordered, "a worker takes no run meanwhile"
    (guard,) = this.guards()
    guard.send(signal.SIGTERM)
    until(lambda: saves(this, "rank-00000"))
    if lost == "head":
        head.kill()
    elif lost == "parent":
        parent.kill()
        parent.wait()
    else:
        (this.folder / head_lease.LEASE).write_text(f"{time.monotonic() - 61:<24.3f}")  # as if last renewed long ago
    if is_ordered:
        time.sleep(1.5)  # the guard looks at least once meanwhile
        end_saves(this)
    until(lambda: this.exit_record("rank-00000"))
    assert this.log("rank-00000").read_text() == log
    assert recorded_exit(this)[0] == {"head": Cause.HEAD, "parent": Cause.PARENT, "lease": Cause.HEAD}[lost]
    until(lambda: not survivors(this.run_id))
    assert this.folder not in stopping_attempts()


def test_a_rank_gets_no_time_to_save_if_a_peer_failed(this: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)  # the rank ignores SIGTERM
    watchdog = Watchdog(this, "rank-00000", os.getpid(), None)
    assert watchdog.handle_signals(bytes([signal.SIGTERM])) is None
    this.write_process("rank-00001", ProcessIdentity(1, 0), ProcessIdentity(1, 0))
    this.write_exit(ExitRecord("rank-00001", -9, Cause.EXITED, "exited", now(), now()))
    assert watchdog.check() == (Cause.REQUESTED, "rank-00001 failed")


def test_sigterm_to_a_launchers_guard_orders_a_stop_and_leaves_the_launcher_running(
    this: Attempt, start: Start, until: Until
) -> None:
    guard = start(*guard_arguments(this, SLEEP, "--launcher"))
    until((this.folder / "launcher.pid").exists)
    guard.terminate()
    until(lambda: this.is_stop_ordered)
    assert guard.poll() is None
    guard.send_signal(signal.SIGINT)
    assert guard.wait(HANG_SECONDS) == 1

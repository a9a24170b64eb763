import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from infra.head.hosts.ssh import Transport
from infra.head.launch import host_session
from infra.head.launch.attempt_outcome import ClusterWatch
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.supervision import Supervision
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.session_messages import Alive, Order, RankEnded, RankError, RankPhase
from infra.node.processes import ProcessIdentity
from t5train.errors import DiskFailed, DiskFull, HostLost, LaunchError, RankKilled
from t5train.rank import heartbeat
from t5train.rank.heartbeat import Beat, beat_file

HOSTS = {"a": (0,), "b": (0,)}
LEASE_SECONDS = 60.0


class Hosts(Transport, Protocol):
    def attempt_folder(self, host: str, run_id: str) -> Path: ...

    def prepare(self, this: Attempt) -> None: ...


class Unsteady:
    """A transport that runs ``instead`` for hosts whose letter is in ``silent``, and ``transport`` for the others.

    New connections to hosts whose letter is in ``responsive`` get through nevertheless, except for sessions.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.silent, self.instead = transport, "", ["sleep", "600"]
        self.responsive, self.actions = "", list[tuple[str, str]]()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        self.actions.append((host, argv[-1]))
        is_silent = host in self.silent and (host not in self.responsive or argv[-1] == "watch")
        return self.instead if is_silent else self.transport.command(host, argv)


@pytest.fixture
def this(tmp_path: Path, local_hosts: Hosts) -> Attempt:
    """An attempt that is prepared on two hosts, with a lease that is longer than sessions take to start."""
    this = attempt.begin(tmp_path / "run", None, LEASE_SECONDS, HOSTS)
    local_hosts.prepare(this)
    return this


@pytest.fixture
def transport(local_hosts: Hosts) -> Unsteady:
    return Unsteady(local_hosts)


@pytest.fixture
def supervise(this: Attempt, transport: Unsteady, tmp_path: Path) -> Iterator[Callable[..., Supervision]]:
    opened: list[Supervision] = []

    def supervise(**boot_ids: str) -> Supervision:
        (tmp_path / "head").mkdir()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        opened.append(Supervision(this, transport, tmp_path / "head", {"a": boot_id, "b": boot_id} | boot_ids))
        return opened[-1]

    yield supervise
    for one in opened:
        one.close()


def exit_record(rank: int, returncode: int) -> ExitRecord:
    host = list(HOSTS)[rank]
    return ExitRecord(attempt.rank_name(rank), returncode, Cause.EXITED, "exited", "then", attempt.now(), host)


def end_rank(folder: Path, rank: int, returncode: int = 0) -> None:
    replace(attempt.read(folder)).write_exit(exit_record(rank, returncode))


def look_until(supervision: Supervision, condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Process the hosts' messages until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        supervision.look(0.1)


def look_until_lost(supervision: Supervision, responding: str = "") -> None:
    """Process the hosts' messages until the lease of all hosts but one, which always responds, has expired."""
    supervision.this = replace(supervision.this, lease_seconds=5.0)

    def are_lost() -> bool:
        if responding:  # its session may be slow to start, or to report
            supervision._take(responding, time.monotonic(), Alive(()))
        return supervision.failure is not None and len(supervision.failure.hosts) == len(HOSTS) - len(responding)

    look_until(supervision, are_lost)


def test_a_run_succeeds_when_every_rank_has_a_good_exit_record(
    this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision], tmp_path: Path
) -> None:
    supervision, lease = supervise(), tmp_path / "head" / head_lease.LEASE
    end_rank(local_hosts.attempt_folder("a", this.run_id), 0)
    look_until(supervision, lambda: supervision.records)
    assert not supervision.succeeded
    assert not supervision.failed
    end_rank(local_hosts.attempt_folder("b", this.run_id), 1)
    look_until(supervision, lambda: supervision.all_ended)
    assert supervision.succeeded
    assert this.exit_record("rank-00001") == supervision.records["rank-00001"]
    begun = lease.read_text()
    look_until(supervision, lambda: lease.read_text() != begun)


def test_a_rank_name_from_a_host_cannot_escape_the_attempts_folder(
    this: Attempt, supervise: Callable[..., Supervision]
) -> None:
    supervision = supervise()
    supervision._take("a", 0.0, RankError("../../stray", "DiskFull", ""))
    supervision._take("a", 0.0, RankEnded(ExitRecord("../../stray", 0, Cause.EXITED, "", "", "")))
    assert not list(this.folder.parent.parent.glob("stray*"))
    assert not supervision.records


def test_the_first_bad_exit_record_is_a_failure_and_the_ranks_error_is_copied(
    this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision]
) -> None:
    supervision = supervise()
    folder = local_hosts.attempt_folder("b", this.run_id)
    (folder / "rank-00001.error.json").write_text('{"type": "DiskFull", "message": "no room"}')
    end_rank(folder, 1, 1)
    look_until(supervision, lambda: supervision.failed)
    assert json.loads((this.folder / "rank-00001.error.json").read_text()) == {"type": "DiskFull", "message": "no room"}


def test_a_broken_session_reconnects_without_losing_records(
    this: Attempt,
    transport: Unsteady,
    local_hosts: Hosts,
    supervise: Callable[..., Supervision],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_session, "_SILENT_SECONDS", 5.0)
    transport.silent = "b"  # a first connection without a message is given up after _SILENT_SECONDS
    supervision = supervise()
    end_rank(local_hosts.attempt_folder("a", this.run_id), 0)
    look_until(supervision, lambda: supervision.records)
    transport.silent = ""
    end_rank(local_hosts.attempt_folder("b", this.run_id), 1)
    look_until(supervision, lambda: supervision.succeeded)
    assert not supervision.failed


def test_a_silent_host_causes_a_warning_and_is_lost_when_the_lease_expires(
    transport: Unsteady,
    supervise: Callable[..., Supervision],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infra.head.launch.supervision._SILENT_SECONDS", 2.0)
    transport.silent = "b"
    supervision = supervise()
    look_until_lost(supervision, responding="a")
    assert isinstance(supervision.failure, HostLost)
    assert re.match(r"b has not responded for ([5-9]|\d\d) s, so it counts as lost\.", str(supervision.failure))
    assert re.search(r"b has not responded for [2-4] s and counts as lost after 5 s", caplog.text)
    assert supervision.silent == ["b"]


def test_a_host_that_sends_no_valid_message_is_lost_and_its_output_is_quoted(
    transport: Unsteady, supervise: Callable[..., Supervision]
) -> None:
    transport.silent, transport.instead = "b", ["sh", "-c", "echo Welcome!; sleep 600"]
    supervision = supervise()
    look_until(supervision, lambda: supervision.broken("b") != "nothing arrives from it")
    look_until_lost(supervision, responding="a")
    assert "got 'Welcome!' instead of a message" in str(supervision.failure)


def test_a_restarted_host_is_lost_at_once(supervise: Callable[..., Supervision]) -> None:
    supervision = supervise(b="another")
    look_until(supervision, lambda: supervision.failed)
    assert str(supervision.failure) == "b was restarted while its ranks were running"


def test_a_host_without_a_record_of_the_attempt_is_lost_at_once(
    this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision]
) -> None:
    shutil.rmtree(local_hosts.attempt_folder("b", this.run_id))  # as with a new disk
    supervision = supervise()
    look_until(supervision, lambda: supervision.failed)
    assert str(supervision.failure).startswith("b reports that the attempt has ended, but the head did not")


def test_a_killed_guard_is_a_failure(this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision]) -> None:
    supervision = supervise()
    gone = {"pid": os.getpid(), "start_time": 1}
    folder = local_hosts.attempt_folder("b", this.run_id)
    (folder / "rank-00001.pid").write_text(json.dumps({"process": gone, "guard": gone}))
    look_until(supervision, lambda: supervision.failed)
    assert supervision.failure is None  # infra.head.launch.failures finds the rank


def test_lines_of_ranks_are_logged_with_their_host_and_without_secrets(
    this: Attempt,
    local_hosts: Hosts,
    supervise: Callable[..., Supervision],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "s3cret-value")
    caplog.set_level("INFO")
    (local_hosts.attempt_folder("a", this.run_id) / "rank-00000.log").write_text("with s3cret-value\n")
    (local_hosts.attempt_folder("b", this.run_id) / "rank-00001.log").write_text("chatter\nWARNING of b\n")
    supervision = supervise()
    look_until(supervision, lambda: "WARNING of b" in caplog.text and "rank-00000" in caplog.text)
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["b rank-00001: WARNING of b"] == "WARNING"
    assert "s3cret" not in caplog.text
    assert "chatter" not in caplog.text


def test_the_phase_of_rank_0_is_kept_in_the_clock_of_the_head(
    this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision]
) -> None:
    supervision, now = supervise(), time.monotonic()
    folder, kept = local_hosts.attempt_folder("a", this.run_id), beat_file(this.folder / "head")
    heartbeat.write(beat_file(folder / "rank-00000"), Beat(now, "save", now - 500, 1800, 40))
    look_until(supervision, kept.exists)
    beat = heartbeat.read(kept)
    assert beat is not None
    assert (beat.phase, beat.step, beat.limit) == ("save", 40, 1800)
    assert 499 <= beat.beat - beat.since < 560
    supervision._take("a", now, RankPhase("../save", 1, 0.0, 1.0))
    assert heartbeat.read(kept) == beat


def test_the_order_to_end_reaches_all_hosts(
    this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision]
) -> None:
    supervision = supervise()
    supervision.order(Order.END)
    look_until(supervision, lambda: not supervision.not_ended)
    assert not supervision.failed
    assert not (local_hosts.attempt_folder("a", this.run_id) / "lease").exists()


def test_queued_messages_are_read_before_a_host_counts_as_silent(
    this: Attempt, transport: Unsteady, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SilentSession:
        def __init__(self, *arguments: Any) -> None:
            _, self.host, _, _, self.news = arguments
            opened.append(self)

        def close(self) -> None: ...
        def join(self) -> None: ...

    opened: list[SilentSession] = []
    monkeypatch.setattr("infra.head.launch.supervision.HostSession", SilentSession)
    (tmp_path / "head").mkdir()
    supervision = Supervision(this, transport, tmp_path / "head", None)
    for host in supervision._hosts.values():
        host.last_message_at -= 2 * LEASE_SECONDS
    for one in opened:
        one.news.put((one.host, time.monotonic(), Alive(())))
    supervision.look(0)
    assert not supervision.failed
    assert supervision.silent == []
    supervision.close()


def test_a_host_whose_disk_cannot_be_written_is_named_at_once(
    this: Attempt, local_hosts: Hosts, supervise: Callable[..., Supervision]
) -> None:
    supervision, lease = supervise(), local_hosts.attempt_folder("b", this.run_id) / head_lease.LEASE
    begun = lease.read_text()
    look_until(supervision, lambda: lease.read_text() != begun)
    lease.unlink()
    lease.symlink_to(lease.name)  # a link to itself cannot be opened
    look_until(supervision, lambda: supervision.failed)
    assert type(supervision.failure) is DiskFailed
    assert str(supervision.failure).startswith(f"b: {lease}: Too many levels of symbolic links; ")
    assert supervision.failure.hosts == ("b",)


def test_ranks_are_ended_although_the_heads_own_disk_is_full(
    this: Attempt, supervise: Callable[..., Supervision], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_exit(_this: Attempt, record: ExitRecord) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/full/{record.name}.exit.json")

    supervision = supervise()
    monkeypatch.setattr(Attempt, "write_exit", write_exit)
    supervision._take("a", time.monotonic(), RankEnded(exit_record(0, -9)))
    supervision.order(Order.END)
    look_until(supervision, lambda: not supervision.not_ended)
    assert type(supervision.failure) is DiskFull
    assert str(supervision.failure).startswith("this machine: /full/rank-00000.exit.json: No space left on device; ")
    assert supervision.failure.hosts == ()


def test_hosts_that_are_lost_together_are_all_named(transport: Unsteady, supervise: Callable[..., Supervision]) -> None:
    transport.silent = "ab"
    supervision = supervise()
    look_until_lost(supervision)
    supervision.look(0.5)
    assert supervision.failure is not None
    assert supervision.failure.hosts == ("a", "b")
    assert re.fullmatch(r"a has not responded for \d+ s, .*; b has not .* for \d+ s, .*", str(supervision.failure))


@pytest.fixture
def failing(this: Attempt, transport: Unsteady, supervise: Callable[..., Supervision]) -> Callable[..., ClusterWatch]:
    """``failing(output, returncode)``: the watch of an attempt whose rank on a has failed, while b is silent."""

    def failing(output: str, returncode: int) -> ClusterWatch:
        transport.silent, transport.instead = "b", ["sh", "-c", "exit 255"]
        supervision = supervise()
        look_until(supervision, lambda: "a" not in supervision.silent and supervision.broken("b").startswith("b: "))
        (this.folder / "rank-00000.log").write_text(output)
        supervision._take("a", time.monotonic(), RankEnded(exit_record(0, returncode)))
        supervision._hosts["b"].last_message_at -= 10.0  # silent, but its lease has not expired
        supervision.look(0)
        assert supervision.silent == ["b"]
        assert supervision.failed
        return ClusterWatch(supervision, ClusterLauncher(this.run_id), transport, lambda: None)

    return failing


def test_a_silent_host_is_asked_over_a_new_connection_and_not_blamed_for_another_hosts_rank(
    this: Attempt, transport: Unsteady, local_hosts: Hosts, failing: Callable[..., ClusterWatch]
) -> None:
    watch, lease = failing("", -9), local_hosts.attempt_folder("b", this.run_id) / head_lease.LEASE
    assert lease.exists()
    transport.responsive = "b"
    watch.end()
    assert not lease.exists()
    failure = watch.failure()
    assert isinstance(failure, RankKilled)
    assert failure.hosts == ("a",)
    assert str(failure).startswith("rank 0 of 2 on a was killed by SIGKILL. ")


@pytest.mark.parametrize(
    ("output", "returncode", "kind", "hosts"),
    [
        ("", -9, RankKilled, ("a",)),
        ("OSError: [Errno 28] No space left on device: '/r/x.pt'", 1, DiskFull, ("a",)),
        ("ValueError: something else", 1, LaunchError, ("a",)),
        ("Connection closed by peer [10.0.0.2]", 1, HostLost, ("b",)),
        ("Watchdog caught collective operation timeout", -6, HostLost, ("b",)),
    ],
)
def test_a_host_that_does_not_answer_is_blamed_only_if_no_rank_failed_by_itself(
    failing: Callable[..., ClusterWatch], output: str, returncode: int, kind: type[LaunchError], hosts: tuple[str, ...]
) -> None:
    watch = failing(output, returncode)
    watch.end()
    failure = watch.failure()
    assert type(failure) is kind
    assert failure.hosts == hosts


def test_an_exit_that_nothing_explains_is_not_the_cause_if_another_host_was_lost_before(
    failing: Callable[..., ClusterWatch],
) -> None:
    watch = failing("an error that no pattern knows", 1)
    watch._supervision._hosts["b"].last_message_at -= 2 * LEASE_SECONDS
    watch.end()
    failure = watch.failure()
    assert isinstance(failure, HostLost)
    assert failure.hosts == ("b",)


def test_a_rank_that_exceeded_its_deadline_is_not_the_cause_if_another_host_was_lost(
    this: Attempt, failing: Callable[..., ClusterWatch]
) -> None:
    """On a GPU, a rank that waits for a lost host does so outside torch.distributed, until the deadline of its step."""
    watch = failing('File "/v/torch/cuda/__init__.py", line 1 in synchronize', -9)
    reason = "phase 'step' of step 7 took 61 s; its deadline is 60 s"
    this.write_exit(replace(exit_record(0, -9), cause=Cause.PHASE, reason=reason))
    watch.end()
    failure = watch.failure()
    assert isinstance(failure, HostLost)
    assert failure.hosts == ("b",)
    assert "rank 0 of 2 on a was ended by its guard (phase 'step' of step 7 took 61 s" in str(failure)


def test_a_restarted_host_is_the_cause_although_its_rank_left_no_exit_record(
    this: Attempt, transport: Unsteady, supervise: Callable[..., Supervision]
) -> None:
    supervision = supervise(b="another")
    look_until(supervision, lambda: supervision.failed)
    this.write_process("rank-00001", ProcessIdentity(1, 0), ProcessIdentity(1, 0))  # as collected from there
    failure = ClusterWatch(supervision, ClusterLauncher(this.run_id), transport, lambda: None).failure()
    assert isinstance(failure, HostLost)
    assert str(failure) == "b was restarted while its ranks were running"


def test_a_rank_that_failed_by_itself_is_the_cause_even_if_a_lease_expires_while_the_attempt_ends(
    transport: Unsteady, failing: Callable[..., ClusterWatch]
) -> None:
    watch = failing("", -9)
    watch._supervision._hosts["b"].last_message_at -= LEASE_SECONDS
    watch.end()
    assert watch._supervision.failure is not None
    failure = watch.failure()
    assert isinstance(failure, RankKilled)
    assert failure.hosts == ("a",)
    assert ("b", "end") not in transport.actions  # its ranks have ended by themselves


def test_a_save_at_the_end_is_not_cut_off_because_a_host_was_silent_for_a_moment(
    this: Attempt, supervise: Callable[..., Supervision], transport: Unsteady
) -> None:
    supervision = supervise()
    supervision._hosts["b"].is_silent = True
    watch = ClusterWatch(supervision, ClusterLauncher(this.run_id), transport, lambda: None)
    watch.this = replace(this, grace_seconds=1.0, save_seconds=500.0)
    assert watch._stop_seconds() > watch.this.save_seconds


def test_no_host_is_blamed_if_all_are_lost_at_once_as_when_the_heads_network_fails(
    this: Attempt, transport: Unsteady, supervise: Callable[..., Supervision]
) -> None:
    transport.silent, transport.instead = "ab", ["sh", "-c", "exit 255"]
    supervision = supervise()
    watch = ClusterWatch(supervision, ClusterLauncher(this.run_id), transport, lambda: None)
    for host in supervision._hosts.values():
        host.last_message_at -= 2 * LEASE_SECONDS
    supervision.look(0)
    failure = watch.failure()
    assert isinstance(failure, HostLost)
    assert failure.hosts == ()
    assert "a has not responded for 12" in str(failure)
    assert str(failure).endswith(". All hosts were lost at once, so check this machine and its network first")


def test_an_unreachable_host_is_named_together_with_a_lost_one(
    transport: Unsteady, supervise: Callable[..., Supervision], this: Attempt
) -> None:
    transport.silent = "b"
    supervision = supervise(a="another")
    watch = ClusterWatch(supervision, ClusterLauncher(this.run_id), transport, lambda: None)
    look_until(supervision, lambda: supervision.failed)
    transport.silent, transport.instead = "b", ["sh", "-c", "exit 255"]
    watch.end()
    failure = watch.failure()
    assert isinstance(failure, HostLost)
    assert failure.hosts == ("a", "b")
    assert str(failure).startswith("a was restarted while its ranks were running; b was also lost: ")

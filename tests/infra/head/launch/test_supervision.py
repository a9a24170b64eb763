import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.hosts.agents import Agent, Agents, ChannelBroken, News
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Transport
from infra.head.launch.attempt_outcome import ClusterWatch
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.supervision import Supervision
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.agent_messages import (
    Alive,
    Ended,
    Hello,
    NewLines,
    Order,
    RankEnded,
    RankError,
    RankLine,
    RankPhase,
    Report,
)
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.processes import ProcessIdentity
from t5train.errors import CollectiveTimeout, DiskFailed, DiskFull, HostLost, LaunchError, RankKilled
from t5train.files import heartbeat
from t5train.files.heartbeat import Beat, beat_file
from tests.support.simulated_nodes import LocalHosts, Unsteady, link_to_itself
from tests.support.waiting import await_that

HOSTS = {"a": (0,), "b": (0,)}
LEASE_SECONDS = 60.0
Supervise = Callable[[], Supervision]
Failing = Callable[..., ClusterWatch]


class ToldAgent(Agent):
    """Stands for the agent on a host: it reports what the test tells it to, and that the attempt has ended."""

    def __init__(self, host: str) -> None:
        self.host, self.ends = host, True

    def watch(self, _run_id: str, _offsets: object, news: News) -> None:
        self.news = news

    def report(self, *reports: Report | ChannelBroken) -> None:
        for report in reports:
            self.news.put((self.host, time.monotonic(), report))

    def order(self, order: Order) -> None:
        if order == Order.END and self.ends:
            self.report(Ended(()))

    def unwatch(self) -> None: ...


ToldAgents = dict[str, ToldAgent]


@pytest.fixture
def this(tmp_path: Path) -> Attempt:
    """An attempt on two hosts, with a lease that is longer than agents take to start."""
    return attempt.begin(tmp_path / "run", None, LEASE_SECONDS, HOSTS)


@pytest.fixture
def prepared(this: Attempt, local_hosts: LocalHosts) -> Attempt:
    """The attempt, which is also prepared on both hosts, as real agents need it."""
    local_hosts.prepare(this)
    return this


@pytest.fixture
def transport(local_hosts: LocalHosts) -> Unsteady:
    return Unsteady(local_hosts)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ToldAgents:
    """By host, what takes the place of agents in ``supervise``."""
    agents = {host: ToldAgent(host) for host in HOSTS}
    monkeypatch.setattr(Agents, "on", lambda *_: agents)
    return agents


@pytest.fixture
def supervise(this: Attempt, transport: Unsteady, tmp_path: Path) -> Iterator[Supervise]:
    opened, agents = list[Supervision](), Agents()

    def supervise() -> Supervision:
        (tmp_path / "head").mkdir()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        on_hosts = agents.on(Nodes(transport, tuple(HOSTS)), LEASE_SECONDS)
        opened.append(Supervision(this, on_hosts, tmp_path / "head", {"a": boot_id, "b": boot_id}))
        return opened[-1]

    yield supervise
    for one in opened:
        one.close()
    agents.close()


def exit_record(rank: int, returncode: int) -> ExitRecord:
    host = list(HOSTS)[rank]
    return ExitRecord(attempt.rank_name(rank), returncode, Cause.EXITED, "exited", "then", attempt.now(), host)


def end_rank(folder: Path, rank: int, returncode: int = 0) -> None:
    attempt.read(folder).write_exit(exit_record(rank, returncode))


def look_until(supervision: Supervision, condition: Callable[[], object]) -> None:
    """Process the hosts' messages until the condition holds."""
    await_that(lambda: supervision.look(0.1) or condition(), seconds=60.0)


def be_silent(supervision: Supervision, host: str, seconds: float) -> None:
    """Let it be that many seconds longer since the last message of a host."""
    supervision._hosts[host].last_message_at -= seconds


def failures(supervision: Supervision) -> str:
    return "; ".join(str(each.error) for each in supervision.evidence)


def watch_of(supervision: Supervision, transport: Transport) -> ClusterWatch:
    return ClusterWatch(supervision, ClusterLauncher(supervision.this.run_id), transport, lambda: None)


def test_a_run_succeeds_when_every_rank_has_a_good_exit_record_also_of_a_host_that_was_unreachable(
    prepared: Attempt, transport: Unsteady, local_hosts: LocalHosts, supervise: Supervise, tmp_path: Path
) -> None:
    transport.unreachable = "b"
    supervision, lease = supervise(), tmp_path / "head" / head_lease.LEASE
    end_rank(local_hosts.attempt_folder("a", prepared.run_id), 0)
    look_until(supervision, lambda: supervision.records)
    assert not supervision.succeeded
    assert not supervision.failed
    end_rank(local_hosts.attempt_folder("b", prepared.run_id), 1)
    look_until(supervision, lambda: supervision._hosts["b"].broken.startswith("b: "))
    assert not supervision.all_ended
    transport.unreachable = ""
    look_until(supervision, lambda: supervision.all_ended)
    assert supervision.succeeded
    assert prepared.exit_record("rank-00001") == supervision.records["rank-00001"]
    begun = lease.read_text()
    look_until(supervision, lambda: lease.read_text() != begun)


def test_the_phase_of_rank_0_is_kept_in_the_clock_of_the_head(
    prepared: Attempt, local_hosts: LocalHosts, supervise: Supervise
) -> None:
    supervision, now = supervise(), time.monotonic()
    folder, kept = local_hosts.attempt_folder("a", prepared.run_id), beat_file(prepared.folder / "head")
    heartbeat.write(beat_file(folder / "rank-00000"), Beat(now, "save", now - 500, 1800, 40))
    look_until(supervision, kept.exists)
    beat = heartbeat.read(kept)
    assert beat is not None
    assert (beat.phase, beat.step, beat.limit) == ("save", 40, 1800)
    assert 499 <= beat.beat - beat.since < 560
    supervision._take("a", now, RankPhase("../save", 1, 0.0, 1.0))
    assert heartbeat.read(kept) == beat


def test_a_host_whose_disk_cannot_be_written_is_named_at_once(
    prepared: Attempt, local_hosts: LocalHosts, supervise: Supervise
) -> None:
    supervision, lease = supervise(), local_hosts.attempt_folder("b", prepared.run_id) / head_lease.LEASE
    begun = lease.read_text()
    look_until(supervision, lambda: lease.read_text() != begun)
    link_to_itself(lease)  # while the host writes it
    look_until(supervision, lambda: supervision.failed)
    evidence = supervision.evidence[0]
    assert type(evidence.error) is DiskFailed
    assert str(evidence.error).startswith(f"b: {lease}: Too many levels of symbolic links; ")
    assert evidence.hosts == ("b",)


def test_a_rank_name_of_a_host_cannot_leave_a_folder(this: Attempt, told: ToldAgents, supervise: Supervise) -> None:
    supervision = supervise()
    ended = RankEnded(ExitRecord("../../stray", 0, Cause.EXITED, "", "", ""))
    told["a"].report(RankError("../../stray", "DiskFull", ""), ended)
    supervision.look(0)
    assert not list(this.folder.parent.parent.glob("stray*"))
    assert not supervision.records


def test_the_first_bad_exit_record_is_a_failure_and_the_ranks_error_is_copied(
    this: Attempt, told: ToldAgents, supervise: Supervise
) -> None:
    supervision = supervise()
    told["b"].report(RankError("rank-00001", "DiskFull", "no room"), RankEnded(exit_record(1, 1)))
    supervision.look(0)
    assert supervision.failed
    assert json.loads((this.folder / "rank-00001.error.json").read_text()) == {"type": "DiskFull", "message": "no room"}


def test_a_silent_host_causes_a_warning_and_is_lost_when_the_lease_expires(
    told: ToldAgents, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    supervision = supervise()
    for silent_seconds in (6.0, LEASE_SECONDS - 6.0):  # together, as long as the lease
        assert not supervision.failed
        be_silent(supervision, "b", silent_seconds)
        told["a"].report(Alive(()))
        supervision.look(0)
        assert supervision.silent == ["b"]
        told["b"].report(ChannelBroken("got 'Welcome!' instead of a message"))
    (evidence,) = supervision.evidence
    assert re.match(r"b has not responded for 6\d s, so it counts as lost\.", str(evidence.error))
    assert "got 'Welcome!' instead of a message" in str(evidence.error)
    assert (type(evidence.error), evidence.hosts) == (HostLost, ("b",))
    supervision.look(0)
    assert supervision.evidence == [evidence]
    assert re.search(r"b has not responded for \d+ s and counts as lost after 60 s: nothing arrives", caplog.text)


def test_a_restarted_host_is_lost_at_once(transport: Unsteady, told: ToldAgents, supervise: Supervise) -> None:
    supervision = supervise()
    told["b"].report(Hello("", "another", {}))
    supervision.look(0)
    failure = watch_of(supervision, transport).failure()
    assert (type(failure), str(failure)) == (HostLost, "b was restarted while its ranks were running")


def test_a_killed_guard_is_a_failure_and_a_host_that_lost_the_attempt_is_lost_at_once(
    told: ToldAgents, supervise: Supervise, transport: Unsteady
) -> None:
    supervision = supervise()
    told["b"].report(Alive(("rank-00001",)))
    supervision.look(0)
    assert supervision.failed
    assert "rank 1 of 2 on b was killed together with its guard" in str(watch_of(supervision, transport).failure())
    told["b"].report(Ended(()))  # as with a new disk
    supervision.look(0)
    assert failures(supervision).startswith("b reports that the attempt has ended, but the head did not")


def test_a_guard_that_the_head_ended_before_it_could_record_its_rank_is_not_blamed(
    this: Attempt, told: ToldAgents, supervise: Supervise, transport: Unsteady
) -> None:
    supervision = supervise()
    this.write_process("rank-00001", ProcessIdentity(1, 0), ProcessIdentity(1, 0))
    (this.folder / "rank-00000.log").write_text("collective operation timeout")
    told["a"].report(RankEnded(exit_record(0, 1)))
    supervision.order(Order.END)
    told["b"].report(Alive(("rank-00001",)))
    supervision.look(0)
    assert isinstance(watch_of(supervision, transport).failure(), CollectiveTimeout)


def test_lines_of_ranks_are_logged_with_their_host_and_without_secrets(
    told: ToldAgents, supervise: Supervise, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "s3cret-value")
    caplog.set_level("INFO")
    supervision = supervise()
    told["a"].report(NewLines((RankLine("rank-00000", "with s3cret-value"),), 0, {}))
    told["b"].report(NewLines((RankLine("rank-00001", "WARNING of b"),), 0, {}))
    supervision.look(0)
    assert ("WARNING", "b rank-00001: WARNING of b") in [(each.levelname, each.message) for each in caplog.records]
    assert "a rank-00000: with " in caplog.text
    assert "s3cret" not in caplog.text


def test_queued_messages_are_read_before_a_host_counts_as_silent(told: ToldAgents, supervise: Supervise) -> None:
    supervision = supervise()
    for host, agent in told.items():
        be_silent(supervision, host, 2 * LEASE_SECONDS)
        agent.report(Alive(()))
    supervision.look(0)
    assert (supervision.failed, supervision.silent) == (False, [])


def test_ranks_are_ended_although_the_heads_own_disk_is_full(
    told: ToldAgents, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_exit(_this: Attempt, record: ExitRecord) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/full/{record.name}.exit.json")

    supervision = supervise()
    monkeypatch.setattr(Attempt, "write_exit", write_exit)
    told["a"].report(RankEnded(exit_record(0, -9)))
    supervision.order(Order.END)
    supervision.look(0)
    assert not supervision.not_ended
    (evidence,) = supervision.evidence
    assert type(evidence.error) is DiskFull
    assert str(evidence.error).startswith("this machine: /full/rank-00000.exit.json: No space left on device; ")
    assert evidence.hosts == ()


@pytest.fixture
def failing(this: Attempt, transport: Unsteady, told: ToldAgents, supervise: Supervise) -> Failing:
    """``failing(output, returncode)``: the watch of an attempt whose rank on a has failed, while b is silent."""

    def failing(output: str, returncode: int) -> ClusterWatch:
        transport.unreachable = "ab"
        supervision = supervise()
        told["b"].ends = False
        told["b"].report(ChannelBroken("b: the connection was lost"))
        (this.folder / "rank-00000.log").write_text(output)
        supervision.look(0)
        be_silent(supervision, "b", 10.0)  # its lease has not expired
        told["a"].report(RankEnded(exit_record(0, returncode)))
        supervision.look(0)
        assert supervision.silent == ["b"]
        assert supervision.failed
        return watch_of(supervision, transport)

    return failing


def test_a_silent_host_is_asked_over_a_new_connection_and_not_blamed_for_another_hosts_rank(
    prepared: Attempt, transport: Unsteady, local_hosts: LocalHosts, failing: Failing
) -> None:
    watch, lease = failing("", -9), local_hosts.attempt_folder("b", prepared.run_id) / head_lease.LEASE
    assert lease.exists()
    transport.unreachable = "a"
    watch.end()
    assert not lease.exists()
    failure = watch.failure()
    assert isinstance(failure, RankKilled)
    assert str(failure).startswith("rank 0 of 2 on a was killed by SIGKILL. ")


@pytest.mark.parametrize(
    ("output", "silent_leases", "kind", "also"),
    [
        ("OSError: [Errno 28] No space left on device: '/r/x.pt'", 0, DiskFull, "could not end the ranks on b"),
        (
            "Watchdog caught collective operation timeout",
            0,
            HostLost,
            "reported: rank 0 of 2 on a ended with exit code",
        ),
        ("an error that no pattern knows", 2, HostLost, "b has not responded for"),
    ],
)
def test_a_host_that_does_not_answer_is_blamed_only_if_no_rank_failed_by_itself(
    transport: Unsteady, failing: Failing, output: str, silent_leases: int, kind: type[LaunchError], also: str
) -> None:
    watch = failing(output, 1)
    be_silent(watch._supervision, "b", silent_leases * LEASE_SECONDS)
    watch.end()
    failure = watch.failure()
    assert type(failure) is kind
    assert failure.hosts == (("b",) if kind is HostLost else ("a",))
    assert also in str(failure)
    if silent_leases:  # its ranks have ended by themselves
        assert ("b", "end") not in transport.actions


def test_a_save_at_the_end_is_not_cut_off_because_a_host_was_silent_for_a_moment(
    this: Attempt, told: ToldAgents, supervise: Supervise, transport: Unsteady
) -> None:
    supervision = supervise()
    supervision._hosts["b"].is_silent = True
    watch = watch_of(supervision, transport)
    watch.this = replace(this, grace_seconds=1.0, save_seconds=500.0)
    assert watch._stop_seconds() > watch.this.save_seconds


def test_all_hosts_that_are_lost_at_once_are_named_but_none_is_blamed_as_the_heads_network_may_have_failed(
    transport: Unsteady, told: ToldAgents, supervise: Supervise
) -> None:
    supervision = supervise()
    for host in HOSTS:
        be_silent(supervision, host, 2 * LEASE_SECONDS)
    supervision.look(0)
    failure = watch_of(supervision, transport).failure()
    assert (type(failure), failure and failure.hosts) == (HostLost, ())
    assert re.fullmatch(
        r"a has not responded for 12\d s, .*; b has not responded for 12\d s, .* its network first", str(failure)
    )


def test_an_unreachable_host_is_named_together_with_a_lost_one(
    transport: Unsteady, told: ToldAgents, supervise: Supervise
) -> None:
    transport.unreachable = "ab"
    supervision = supervise()
    told["b"].ends = False
    be_silent(supervision, "b", 10.0)
    told["a"].report(Hello("", "another", {}))
    supervision.look(0)
    watch = watch_of(supervision, transport)
    watch.end()
    assert (failure := watch.failure())
    assert failure.hosts == ("a", "b")
    assert str(failure).startswith("a was restarted while its ranks were running; could not end the ranks on b: ")

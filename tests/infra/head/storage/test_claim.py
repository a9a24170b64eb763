"""Of two heads with different roots but the same run name and settings, only one owns the run's files on hosts."""

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.agents import Agents, ChannelBroken, News
from infra.head.hosts.hostfile import Hosts
from infra.head.launch.held_run import hold_run
from infra.head.storage.claim import Claim
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.provisioning import release
from infra.head.storage.recovery import recover
from infra.head.storage.run_storage import NodeLocalStorage
from infra.node import processes
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.agent_messages import Hello
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.head_lease import LEASE
from infra.node.attempts.run_ownership import OWNER, Owner
from infra.node.processes import ProcessIdentity
from infra.node.storage import stored_checkpoints as stored
from t5train.checkpoint import tags
from t5train.errors import HostError, HostUnreachable, NothingVerifies, RemoteFailed, RunOwned
from t5train.files.atomic import write_json
from t5train.files.run_folder import ATTEMPT_SPEC, tag_of
from t5train.progress import silent
from tests.infra.conftest import Start, Until
from tests.support.held_runs import is_lost
from tests.support.simulated_nodes import LocalHosts, Site, Unsteady, await_end

SECONDS = 8.0
"""A short lease, but longer than it takes to start an agent."""


class Head:
    """A head: the run as it knows it, and its claim to the run's files on hosts."""

    def __init__(self, run: NodeRun) -> None:
        self.run, self.agents = run, Agents()
        self.claim = Claim(self.agents)

    def close(self) -> None:
        self.claim.release()
        self.agents.close()

    def claimed(self, adopt: bool = False) -> list[Owner]:
        return self.claim.take(self.run, self.run.nodes.hosts, (), adopt)


@pytest.fixture
def first(run: NodeRun) -> Iterator[Head]:
    head = Head(run)
    yield head
    head.close()


@pytest.fixture
def second(run: NodeRun, tmp_path: Path) -> Iterator[Head]:
    """Another head, whose root has a run of the same name and settings."""
    folder = tmp_path / "other-root" / "runs" / "smoke"
    folder.mkdir(parents=True)
    owner = Owner("2" * 32, "other-head", str(tmp_path / "other-root"), "2026-02-02T00:00:00", 60.0)
    head = Head(replace(run, folder=folder, owner=owner, nodes=replace(run.nodes, owner=owner.unique_id)))
    yield head
    head.close()


def with_short_lease(run: NodeRun) -> NodeRun:
    return replace(run, owner=replace(run.owner, lease_seconds=SECONDS))


def simulate_dead_head(site: Site, head: Head) -> None:
    """Leave everything as if the head had been killed long ago: its lease on all hosts has expired."""
    head.claim.release()
    for host in site.nodes.hosts:
        (site.scratch(host) / head.run.relative_path / LEASE).write_text(f"{time.monotonic() - 61:<24.3f}")


def owners(site: Site, run: NodeRun) -> list[str]:
    files = [site.scratch(host) / run.relative_path / OWNER for host in site.nodes.hosts]
    return [json.loads(file.read_text())["unique_id"] for file in files if file.exists()]


def test_a_second_head_is_refused_with_the_owner_and_what_to_do(site: Site, first: Head, second: Head) -> None:
    assert first.claimed() == []
    message = r"smoke on a, b are owned by head this-head, root /this/root, since 2026-01-01 00:00:00 UTC\. The "
    with pytest.raises(
        RunOwned,
        match=message + r"lease of that head on [ab] is valid for another \d+ s: .* wait .*--adopt.*another --name",
    ):
        second.claimed()
    with pytest.raises(RunOwned, match=r"that head on [ab] is valid for .* it may be running"):
        second.claimed(adopt=True)
    simulate_dead_head(site, first)
    with pytest.raises(
        RunOwned, match=r"The lease of that head has expired\. Take the run over with --adopt, or choose another"
    ):
        second.claimed()
    assert owners(site, first.run) == [first.run.owner.unique_id] * 2
    assert first.claimed() == [], "the first head was not replaced, so it needs to adopt the run from nobody"


def test_a_head_cannot_read_or_write_another_heads_run_on_hosts(site: Site, first: Head, second: Head) -> None:
    site.save(8)
    assert first.claimed() == [], "files without an owner belong to the first head that claims them"
    nodes, run = second.run.nodes, second.run
    for query in (
        stored.ListCheckpoints(nodes.store, run.name),
        stored.PruneCheckpoints(nodes.store, run.name, (tag_of(8),)),
        stored.ListFiles(nodes.store, run.relative_path, ("metrics.jsonl",)),
    ):
        for answer in nodes.ask(query, 20).values():
            assert isinstance(answer, RemoteFailed)
            assert isinstance(answer.__cause__, RunOwned)
            assert "belongs to head this-head" in str(answer)
    for request in (
        stored.SendFiles(nodes.store, run.relative_path),
        stored.ReceiveFiles(nodes.store, run.name, run.relative_path, (), ()),
    ):
        with pytest.raises(RemoteFailed, match="belongs to head this-head"):
            await_end(nodes, "a", request)
    assert all(isinstance(error, HostError) for error in release(nodes, run.name).values())
    assert (site.tag("a", 8)).exists()


def test_a_dead_heads_run_is_adopted_with_its_checkpoints_and_the_dead_head_is_refused(
    site: Site, first: Head, second: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first.claimed()
    site.save(8)
    simulate_dead_head(site, first)

    def write_job(folder: Path) -> Path:
        raise StopIteration(tags.complete_tags(second.run.checkpoints))

    storage = NodeLocalStorage(second.run, write_job, silent, second.claim, adopt=True)
    storage.claim(are_ranks_running=False)
    with pytest.raises(StopIteration, match=tag_of(8)):
        storage.make_ready(tmp_path)
    assert "adopted from head this-head, root /this/root, since 2026-01-01 00:00:00 UTC: step-00000008 " in caplog.text
    assert owners(site, second.run) == [second.run.owner.unique_id] * 2
    with pytest.raises(RunOwned, match="owned by head other-head"):
        first.claimed()


def test_adopting_a_run_without_one_of_its_hosts_does_not_restart_it_at_step_0(
    site: Site, first: Head, second: Head
) -> None:
    first.claimed()
    site.save(8)
    simulate_dead_head(site, first)
    partial = replace(second.run, hosts=Hosts(second.run.hosts.all[:1]), nodes=second.run.nodes.on("a"))
    NodeLocalStorage(partial, Path, silent, second.claim, adopt=True).claim(are_ranks_running=False)
    for _ in range(2):  # the second time, this head owns the run
        with pytest.raises(NothingVerifies, match=rf"{tag_of(8)} lacks rank-00001\.json .*--begin-again"):
            recover(partial, silent)
    assert site.tag("a", 8).exists()


def test_a_head_notices_that_another_head_has_taken_over_its_run(site: Site, first: Head, until: Until) -> None:
    first.run = with_short_lease(first.run)
    first.claimed()
    first.claim.require_kept()
    path = site.scratch("b") / first.run.relative_path / OWNER
    write_json(path, json.loads(path.read_text()) | {"unique_id": "2" * 32, "head": "other-head"})
    until(lambda: is_lost(first.claim))
    with pytest.raises(RunOwned, match="on b are owned by head other-head"):
        first.claim.require_kept()
    assert all(agent.is_idle for agent in first.agents.on(first.run.nodes, SECONDS).values()), "no host renews it now"
    assert json.loads(path.read_text())["head"] == "other-head"


def test_the_lease_is_renewed_until_the_run_is_released_and_expires_afterwards(
    site: Site, first: Head, second: Head, until: Until
) -> None:
    first.run = with_short_lease(first.run)
    leases = [site.scratch(host) / first.run.relative_path / LEASE for host in site.nodes.hosts]
    with hold_run(first.run.folder) as held:
        first.claim = held.claim
        first.claimed()
        for _ in range(2):  # as between two attempts, or while the head verifies checkpoints
            before = [lease.read_text() for lease in leases]
            until(lambda before=before: all(map(str.__ne__, (lease.read_text() for lease in leases), before)))
        with pytest.raises(RunOwned, match="it may be running"):
            second.claimed(adopt=True)
        threads = [agent._thread for agent in held.agents._open.values()]
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    simulate_dead_head(site, first)
    assert [owner.head for owner in second.claimed(adopt=True)] == ["this-head"]


def test_a_channel_that_is_cut_between_two_attempts_is_opened_again_before_the_lease_expires(
    site: Site, first: Head, until: Until
) -> None:
    transport, files = Unsteady(site.transport), site.scratch("b") / first.run.relative_path
    first.run = replace(first.run, nodes=replace(first.run.nodes.on("a"), transport=transport))
    first.claim.take(first.run, ("a",), ("b",), adopt=False)  # b is a former host
    agents = processes.given(str(site.folder / "hosts" / "b"))
    for _ in range(2):
        until(lambda: processes.find(agents))
        processes.end(agents, grace_seconds=0)
        before = (files / LEASE).read_text()
        until(lambda before=before: (files / LEASE).read_text() != before)
        assert head_lease.age_seconds(files) < first.run.owner.lease_seconds
    assert [action for host, action in transport.actions if host == "a"] == ["claim", "claim", "serve"]


STOPPED = """
import sys, time
from pathlib import Path
from infra.head.hosts import agents
from infra.head.hosts.hostfile import Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.storage.claim import Claim
from infra.head.storage.node_paths import NodeRun
from infra.node.attempts.run_ownership import Owner
from t5train.spec import StorageSpec
from tests.support.held_runs import is_lost
from tests.support.simulated_nodes import RUN, LocalHosts
agents.RENEW_SECONDS = 0.1
folder, python, lease_seconds = sys.argv[1:]
owner = Owner("1" * 32, "this-head", "/this/root", "2026-01-01T00:00:00", float(lease_seconds))
nodes = Nodes(LocalHosts(Path(folder), python), ("a",), owner=owner.unique_id)
claim = Claim(agents.Agents())
claim.take(NodeRun(RUN, Path(folder), Hosts.of({"a": (0,)}), nodes, StorageSpec(), owner), ("a",), (), adopt=False)
while not is_lost(claim):
    time.sleep(0.1)
sys.exit(8)
"""
"""A head that renews its claim ten times a second, until it has lost it."""


def test_a_head_that_was_stopped_for_longer_than_its_lease_ends_if_another_one_has_adopted_its_run(
    site: Site, second: Head, local_hosts: LocalHosts, start: Start, until: Until
) -> None:
    files, agents = site.scratch("a") / second.run.relative_path, processes.given(str(site.folder / "hosts" / "a"))
    head = start("-c", STOPPED, str(local_hosts.folder), local_hosts.python, "3.0")

    def await_renewal() -> None:
        before = (files / LEASE).read_text() if (files / LEASE).exists() else ""
        until(lambda: (files / LEASE).exists() and (files / LEASE).read_text() != before)

    for _ in range(2):
        await_renewal()
    head.send_signal(signal.SIGSTOP)  # for less than the lease
    head.send_signal(signal.SIGCONT)
    for _ in range(2):
        await_renewal()
    head.send_signal(signal.SIGSTOP)
    until(lambda: not processes.find(agents))
    assert [owner.head for owner in second.claimed(adopt=True)] == ["this-head"]
    head.send_signal(signal.SIGCONT)
    assert head.wait(60) == 8
    assert owners(site, second.run) == [second.run.owner.unique_id] * 2


def test_a_finished_run_can_be_adopted_at_once(first: Head, second: Head) -> None:
    first.claimed()
    first.claim.release()
    assert not any(release(first.run.nodes, first.run.name).values())
    assert [owner.head for owner in second.claimed(adopt=True)] == ["this-head"]


def test_a_claim_that_one_host_refuses_is_undone_on_the_others(site: Site, first: Head, second: Head) -> None:
    first.claim.take(replace(first.run, nodes=first.run.nodes.on("b")), ("b",), (), adopt=False)
    with pytest.raises(RunOwned, match="on b are owned"):
        second.claimed()
    assert owners(site, second.run) == [first.run.owner.unique_id], "the claim on host a was not undone"


def test_the_run_of_a_copied_root_is_refused_while_its_head_lives(site: Site, first: Head, tmp_path: Path) -> None:
    first.claimed()
    owner = replace(first.run.owner, head="copy-head")
    copy = Head(replace(first.run, folder=tmp_path / "copy", owner=owner))
    with pytest.raises(RunOwned, match=r"owned by head this-head.*it may be running"):
        copy.claimed()
    simulate_dead_head(site, first)
    assert copy.claimed() == [], "a root whose first head is dead counts as moved, not as owned by another head"
    copy.close()


def test_ranks_that_outlive_their_head_prevent_another_head_from_adopting_the_run(
    site: Site, first: Head, second: Head, local_hosts: Any, start: Start
) -> None:
    first.claimed()
    simulate_dead_head(site, first)
    this = Attempt(local_hosts.attempt_folder("a", "id"), "id", "smoke", 1, None, 60.0)
    this.folder.mkdir(parents=True, mode=0o700)
    this.folder.parent.chmod(0o700)
    job = {"node_local": True, "run_folder": str(site.scratch("a") / first.run.relative_path)}
    (this.folder / "spec.json").write_text(json.dumps(job))
    this.write()
    guard = start("-c", "import time; time.sleep(600)")
    identity = ProcessIdentity.of(guard.pid)
    this.write_process("rank-00000", identity, identity)
    with pytest.raises(RunOwned, match="lease of that head on a is valid for"):
        second.claimed(adopt=True)
    guard.kill()
    guard.wait()
    assert len(second.claimed(adopt=True)) == 1


def test_a_claim_is_renewed_although_files_of_another_attempt_there_are_damaged(
    site: Site, first: Head, local_hosts: LocalHosts, until: Until
) -> None:
    first.claimed()
    spec, files = local_hosts.attempt_folder("a", "other") / ATTEMPT_SPEC, site.scratch("a") / first.run.relative_path
    spec.parent.mkdir(parents=True)
    spec.parent.parent.chmod(0o700)
    spec.write_text("{")
    for _ in range(2):
        before = (files / LEASE).read_text()
        until(lambda before=before: (files / LEASE).read_text() != before)


def test_a_claim_is_renewed_although_the_watched_attempt_cannot_be_read_and_that_is_watched_again_when_it_can(
    site: Site, first: Head, local_hosts: LocalHosts, tmp_path: Path, until: Until
) -> None:
    this, news, transport = attempt.begin(tmp_path / "run", None, 60.0, {"a": (0,)}), News(), Unsteady(local_hosts)
    local_hosts.prepare(this)
    first.run = replace(first.run, nodes=replace(first.run.nodes, transport=transport))
    lease, files = local_hosts.attempt_folder("a", this.run_id) / LEASE, site.scratch("a") / first.run.relative_path
    lease.rename(kept := lease.with_name("kept"))
    lease.symlink_to(lease.name)
    first.claimed()
    first.agents.on(first.run.nodes, SECONDS)["a"].watch(this.run_id, {}, news)
    for _ in range(2):
        report = news.get(timeout=60)[2]
        assert isinstance(report, ChannelBroken)
        assert "Too many levels of symbolic links" in report.reason
        before = (files / LEASE).read_text()
        until(lambda before=before: (files / LEASE).read_text() != before)
    kept.replace(lease)
    before = lease.read_text()
    until(lambda: lease.read_text() != before)
    until(lambda: isinstance(news.get(timeout=60)[2], Hello))
    assert transport.actions.count(("a", "serve")) == 1


def test_a_silent_host_blocks_a_claim_before_training_but_not_while_ranks_run(first: Head, site: Site) -> None:
    first.run = replace(first.run, nodes=replace(first.run.nodes, transport=Unsteady(site.transport, "b")))
    with pytest.raises(HostUnreachable):
        first.claimed()
    assert first.claim.take(first.run, (), first.run.nodes.hosts, adopt=False) == []
    first.claim.require_kept()

"""A run is deleted as a whole, here and on hosts, or not at all; what others may use stays."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.launch.held_run import hold_run
from infra.head.runs import run_removal
from infra.head.runs.run_removal import (
    RemovalPlan,
    hosts_of_run,
    machines_of_run,
    plan_removal,
    removable_run,
    remove_run,
)
from infra.head.storage.garbage_collection import free_under, garbage_under
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.run_lock import run_lock
from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import run_path, set_aside_path
from infra.node.processes import ProcessIdentity
from t5train.checkpoint import resume_point
from t5train.errors import HostError, HostUnreachable, InputError, RunLocked, StorageError
from t5train.files.atomic import write_json
from t5train.records.digests import digest_files
from t5train.records.stage_records import Publication
from t5train.spec import MachinesSpec
from tests.support.simulated_nodes import RUN, Site, ThisMachine

OWNER = Owner("1" * 32, "this-head", "/shared/t5", "2026-01-01", 60.0)
OTHER = replace(OWNER, unique_id="2" * 32, head="other-head")
NO_LEASES: Mapping[str, HostError] = {}


@pytest.fixture(autouse=True)
def run(site: Site) -> Path:
    """A run with checkpoints on two hosts and one here."""
    folder = site.root / "runs" / "smoke"
    begun = {"fingerprint": "f00df00df00d" + "0" * 52, "unique_id": OWNER.unique_id, "spec": {}}
    write_json(folder / "run.json", begun)
    site.save(8)
    (site.checkpoints / "step-00000008").mkdir()
    (site.checkpoints / "step-00000008" / "a.pt").write_bytes(bytes(1000))
    for name in ("corpus", "shards", "tokenizer"):
        (site.root / name / "of-all").mkdir(parents=True)
    site.write_owner(OWNER)
    return folder


def planned(site: Site, named: str = "smoke", *, with_published: bool = False) -> RemovalPlan:
    run, folder = removable_run(site.root, named)
    return plan_removal(run, folder, site.nodes, {}, with_published=with_published)


def left(site: Site) -> list[str]:
    return sorted(path.name for path in (site.root / "runs").iterdir())


def on_hosts(site: Site) -> list[bool]:
    return [(site.scratch(host) / run_path(RUN)).exists() for host in site.nodes.hosts]


def test_a_run_is_deleted_here_and_on_all_hosts_and_the_data_stays(site: Site) -> None:
    plan = planned(site)
    assert plan.size_bytes > 1000
    assert {host: [each.relative_path for each in found] for host, found in plan.on_hosts.items()} == {
        host: [run_path(RUN)] for host in "ab"
    }
    assert left(site) == ["smoke"]
    assert on_hosts(site) == [True, True], "nothing is deleted by a plan"
    remove_run(plan, site.nodes)
    assert left(site) == []
    assert on_hosts(site) == [False, False]
    assert all((site.root / name / "of-all").is_dir() for name in ("corpus", "shards", "tokenizer"))


def test_what_hosts_have_of_other_runs_and_what_they_set_aside_stays(site: Site) -> None:
    site.write_owner(OTHER)
    aside = site.scratch("a") / set_aside_path(RUN) / "step-00000004"
    aside.mkdir(parents=True)
    plan = planned(site)
    assert plan.on_hosts == {"a": [], "b": []}
    remove_run(plan, site.nodes)
    assert left(site) == []
    assert on_hosts(site) == [True, True]
    assert aside.is_dir()


def test_what_an_earlier_version_wrote_on_hosts_is_shown_and_kept(site: Site) -> None:
    for host in "ab":
        (site.scratch(host) / run_path(RUN) / "owner.json").unlink()
    plan = planned(site)
    assert [[each.is_kept for each in found] for found in plan.on_hosts.values()] == [[True], [True]]
    remove_run(plan, site.nodes)
    assert (left(site), on_hosts(site)) == ([], [True, True])


def test_folders_of_its_attempts_are_deleted_on_hosts_and_those_of_other_runs_stay(site: Site, run: Path) -> None:
    this = attempt.begin(run, None, 60.0, hosts={"a": (0,), "b": (0,)})
    other = attempt.begin(site.root / "runs" / "other", None, 60.0, hosts={"a": (0,)})
    site.transport.prepare(this)
    site.transport.prepare(other)
    for each, host in ((this, "a"), (this, "b"), (other, "a")):
        (site.transport.attempt_folder(host, each.run_id) / "lease").unlink()
    remove_run(planned(site), site.nodes)
    assert not any(site.transport.attempt_folder(host, this.run_id).exists() for host in "ab")
    assert site.transport.attempt_folder("a", other.run_id).exists()
    assert left(site) == ["other"]


def test_a_run_in_use_is_refused(site: Site, run: Path) -> None:
    with hold_run(run), pytest.raises(RunLocked, match=rf"in use by process {os.getpid()} "):
        planned(site)
    plan = planned(site)
    with run_lock(run), pytest.raises(RunLocked, match="in use by"):
        remove_run(plan, site.nodes)
    this = attempt.begin(run, ProcessIdentity.of(os.getpid()))
    this.write_process("rank-00000", ProcessIdentity.of(os.getpid()), ProcessIdentity.of(os.getpid()))
    with pytest.raises(RunLocked, match=rf"still running \(processes {os.getpid()}"):
        planned(site)
    assert (left(site), on_hosts(site)) == (["smoke"], [True, True])


def test_a_run_whose_lease_is_alive_on_a_host_is_refused(site: Site) -> None:
    folder = site.scratch("b") / run_path(RUN)
    head_lease.begin(folder)
    with pytest.raises(RunLocked, match=r"in use on b by head this-head.* valid for another \d+ s"):
        planned(site)
    (folder / "lease").unlink()
    plan = planned(site)
    head_lease.begin(folder)
    with pytest.raises(RunLocked, match=rf"b keeps {run_path(RUN)}, which is in use by now"):
        remove_run(plan, site.nodes)
    (folder / "lease").unlink()
    assert left(site) == [".smoke.removing"], "it is no run any more, and repeating the command finishes"
    remove_run(planned(site), site.nodes)
    assert (left(site), on_hosts(site)) == ([], [False, False])


def test_nothing_is_deleted_if_a_host_does_not_answer_and_the_error_names_it(site: Site, run: Path) -> None:
    nodes = replace(site.nodes, transport=ThisMachine("b"))
    lost = {"b": HostUnreachable("b: no route to host", ["b"])}
    for these, lacking in ((nodes, NO_LEASES), (site.nodes.on("a"), lost)):
        with pytest.raises(HostError, match=r"'smoke' is not deleted, because b did not answer.*--exclude b\)"):
            plan_removal(run, run, these, lacking, with_published=False)
    assert (left(site), on_hosts(site)) == (["smoke"], [True, True])


def test_a_host_that_fails_during_the_deletion_is_named_and_repeating_the_command_finishes(site: Site) -> None:
    plan = planned(site)
    with pytest.raises(HostError, match=r"'smoke' is deleted here, but not yet on all hosts, because b did not answer"):
        remove_run(plan, replace(site.nodes, transport=ThisMachine("b"), hosts=("b",)))
    assert left(site) == [".smoke.removing"]
    (found,) = garbage_under(site.root)
    assert (found.relative_path, found.is_kept) == ("runs/.smoke.removing", True)
    assert "t5-pretrain rm smoke" in found.why
    again = planned(site)
    assert again.is_interrupted
    assert again.on_hosts["b"], "the hidden folder still says what hosts have"
    remove_run(again, site.nodes)
    assert (left(site), on_hosts(site)) == ([], [False, False])


def test_a_deletion_that_is_killed_half_way_is_finished_by_the_same_command_or_by_gc(
    site: Site, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_folder: Path) -> None:
        raise KeyboardInterrupt

    for finish in ("rm", "gc"):
        run.mkdir(exist_ok=True)
        (run / "run.json").write_text("{}")
        plan = plan_removal(run, run, site.nodes.on(), {}, with_published=False)
        with monkeypatch.context() as patched:
            patched.setattr(run_removal, "remove_folder", killed)
            with pytest.raises(KeyboardInterrupt):
                remove_run(plan, site.nodes.on())
        assert left(site) == [".smoke.discarded"]
        if finish == "rm":
            folders = removable_run(site.root, "smoke")
            remove_run(plan_removal(*folders, site.nodes.on(), {}, with_published=False), site.nodes.on())
        else:
            found = list(garbage_under(site.root))
            assert [(each.relative_path, each.is_kept) for each in found] == [("runs/.smoke.discarded", False)]
            assert free_under(site.root, found) == ["runs/.smoke.discarded"]
        assert left(site) == []


def test_a_new_run_of_that_name_is_not_touched_while_an_interrupted_deletion_is_finished(site: Site, run: Path) -> None:
    run.rename(run.with_name(".smoke.removing"))
    run.mkdir()
    (run / "run.json").write_text("{}")
    remove_run(planned(site), site.nodes)
    assert left(site) == ["smoke"]
    assert on_hosts(site) == [False, False]


def test_two_commands_cannot_finish_the_same_deletion(site: Site, run: Path) -> None:
    hidden = run.with_name(".smoke.removing")
    run.rename(hidden)
    plan = planned(site)
    with run_removal._locked(hidden), pytest.raises(RunLocked, match="being deleted by another process"):
        remove_run(plan, site.nodes)
    assert left(site) == [".smoke.removing"]


def start_other_from(site: Site, start: Path) -> None:
    write_json(site.root / "runs" / "other" / "run.json", {"spec": {"model": {"start_from": str(start)}}})


def publish(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    digests = digest_files(folder, ["config.json"])
    Publication(path=folder, fingerprint="a" * 64, files=digests, url=str(folder)).commit()
    write_json(run / "published.json", {"url": str(folder), "fingerprint": "a" * 64})


def test_a_run_from_which_another_starts_is_refused(site: Site, run: Path) -> None:
    published = site.root / "published" / "smoke"
    publish(run, published)
    (site.root / "runs" / "other").mkdir()
    link = site.folder / "link"
    link.symlink_to(run)
    for start in (run / "export", link / "export", run):
        start_other_from(site, start)
        with pytest.raises(InputError, match=r"run 'other' starts from .*Delete 'other' first"):
            planned(site)
    start_other_from(site, published)
    with pytest.raises(InputError, match="run 'other' starts from"):
        planned(site, with_published=True)
    assert planned(site).published is None, "the published folder stays, so the other run is not affected"
    start_other_from(site, run.with_name("smoke-2") / "export")
    planned(site, with_published=True)


def test_the_published_folder_is_deleted_only_on_request(site: Site, run: Path) -> None:
    published = site.folder / "elsewhere" / "model"
    publish(run, published)
    assert planned(site).published is None
    remove_run(planned(site, with_published=True), site.nodes)
    assert not published.exists()
    assert published.parent.is_dir()


@pytest.mark.parametrize("what", ["a file of somebody", "another publication", "a bucket"])
def test_a_published_folder_that_is_not_only_the_runs_is_never_deleted(site: Site, run: Path, what: str) -> None:
    published = site.folder / "elsewhere" / "model"
    publish(run, published)
    if what == "a file of somebody":
        (published / "notes.txt").write_text("mine")
    elif what == "another publication":
        write_json(run / "published.json", {"url": str(published), "fingerprint": "b" * 64})
    else:
        write_json(run / "published.json", {"url": "s3://bucket/model", "fingerprint": "a" * 64})
    with pytest.raises(InputError, match=r"Leave --published out|leave --published out"):
        planned(site, with_published=True)
    assert (left(site), (published / "config.json").exists()) == (["smoke"], True)


def test_a_run_that_cannot_be_renamed_stays_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Path, _target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    plan = planned(site)
    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(StorageError, match="cannot be renamed"):
        remove_run(plan, site.nodes)
    assert (left(site), on_hosts(site)) == (["smoke"], [True, True])


def test_a_link_is_not_deleted(site: Site, run: Path) -> None:
    run.with_name("link").symlink_to(run)
    with pytest.raises(InputError, match="is a link"):
        removable_run(site.root, "link")


def test_all_hosts_that_the_run_ever_used_are_asked(site: Site, run: Path) -> None:
    attempt.begin(run, None, 60.0, hosts={"node1": (0,), "node0": (0,)})
    attempt.begin(run, None, 60.0, hosts={"node2": (0,)})
    resume_point.note_complete(run, "step-00000008", {"a.pt": ["", "node3"]})
    write_json(run / "not-begun-again.json", ["node4"])
    hostfile = site.folder / "hostfile"
    of_run = [f"node{number}" for number in (1, 0, 2, 3, 4)]
    begun = json.loads((run / "run.json").read_text())
    cluster = {"hostfile": str(hostfile), "include": "node9", "ssh_port": 2222}
    write_json(run / "run.json", begun | {"spec": {"cluster": cluster}})
    assert hosts_of_run(run, machines_of_run(run, None)) == of_run, "its hostfile is gone"
    hostfile.write_text("node8 slots=1\nnode9 slots=1\n")
    assert hosts_of_run(run, machines_of_run(run, None)) == [*of_run, "node9"]
    machines = machines_of_run(run, hostfile)
    assert machines.cluster.ssh_port == 2222
    assert hosts_of_run(run, machines, ["node0"]) == ["node1", "node2", "node3", "node4", "node8", "node9"]
    assert hosts_of_run(site.root / "runs" / "none", MachinesSpec()) == []

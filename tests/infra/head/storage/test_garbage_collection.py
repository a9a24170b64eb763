"""Files that no run needs are found and freed. Files that any head or user may need are left."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from infra.head.storage.garbage_collection import (
    FinishedRun,
    finished_runs,
    free_on,
    free_under,
    garbage_on,
    garbage_under,
    verified,
)
from infra.head.storage.gather import gather
from infra.head.storage.provisioning import release, stage_folder
from infra.node.attempts import head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.run_lock import run_lock
from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import run_path, set_aside_path
from infra.node.storage.garbage import Garbage
from infra.node.storage.left_attempts import KnownAttempts
from infra.node.storage.pull import listed
from t5train.errors import HostError
from t5train.files.run_folder import tag_of
from t5train.progress import silent
from t5train.records.digests import digest_files
from t5train.records.stage_records import Checkpoint
from tests.support.simulated_nodes import RUN, Site

PLACE = "shards/deadbeef"


NOBODYS = KnownAttempts()
OWN = Owner("1" * 32, "this-head", "/root", "2026-01-01", 60.0)


def own(site: Site, owner: Owner = OWN) -> None:
    for host in site.nodes.hosts:
        folder = site.scratch(host) / run_path(RUN)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "owner.json").write_text(json.dumps(asdict(owner)))


@pytest.fixture
def finished(site: Site) -> list[FinishedRun]:
    """The run has ended, and the head has its last checkpoint."""
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    own(site)
    run = site.checkpoints.parent
    (run / "run.json").write_text(json.dumps({"unique_id": OWN.unique_id}))
    files = digest_files(run, [str(path.relative_to(run)) for path in site.checkpoints.glob("*/*")])
    Checkpoint(path=run, fingerprint="f00df00df00dcafe", step=8, tag=tag_of(8), files=files).commit()
    return finished_runs(site.root)


def stage(site: Site, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(1000))
    nodes = replace(site.nodes, owner=OWN.unique_id)
    stage_folder(nodes, tmp_path, listed(tmp_path, ["train.bin"]), PLACE, RUN)


def let_go(site: Site) -> None:
    assert not any(release(replace(site.nodes, owner=OWN.unique_id), RUN).values())


def found_on(site: Site, finished: list[FinishedRun], attempts: KnownAttempts = NOBODYS) -> dict[str, list[Garbage]]:
    found = garbage_on(site.nodes, finished, attempts)
    assert not [each for each in found.values() if isinstance(each, HostError)]
    return found  # type: ignore[return-value]


def test_a_finished_run_and_what_no_run_uses_are_freed_on_all_nodes(
    site: Site, finished: list[FinishedRun], tmp_path: Path
) -> None:
    assert [run.name for run in finished] == [RUN]
    stage(site, tmp_path)
    found = found_on(site, finished)
    assert [[each.place for each in found[host]] for host in "ab"] == [[run_path(RUN)]] * 2, "shards are pinned"
    let_go(site)
    found = found_on(site, finished)
    assert [[(each.place, each.size) for each in found[host]][:1] for host in "ab"] == [[(PLACE, 1000)]] * 2
    assert free_on(site.nodes, finished, NOBODYS, found) == {host: [PLACE, run_path(RUN)] for host in "ab"}
    assert not any((site.scratch(host) / place).exists() for host in "ab" for place in (PLACE, run_path(RUN)))


def test_a_run_that_this_head_does_not_know_is_left(site: Site, finished: list[FinishedRun]) -> None:
    assert found_on(site, []) == {"a": [], "b": []}
    assert found_on(site, [replace(finished[0], name="smoke-0123456789ab")]) == {"a": [], "b": []}


def test_another_heads_run_of_the_same_name_and_settings_is_neither_listed_nor_freed(
    site: Site, finished: list[FinishedRun]
) -> None:
    before = found_on(site, finished)
    own(site, replace(OWN, unique_id="2" * 32, head="other-head"))
    assert found_on(site, finished) == {"a": [], "b": []}
    assert free_on(site.nodes, finished, NOBODYS, before) == {"a": [], "b": []}, "taken over since it was listed"
    assert site.tag("a", 8).exists()


def test_a_run_whose_lease_is_renewed_is_left(site: Site, finished: list[FinishedRun]) -> None:
    head_lease.begin(site.scratch("a") / run_path(RUN))
    assert [len(found) for found in found_on(site, finished).values()] == [0, 1]


def test_what_nobody_has_claimed_is_listed_and_kept(site: Site, finished: list[FinishedRun]) -> None:
    (site.scratch("a") / run_path(RUN) / "owner.json").unlink()
    found = found_on(site, finished)
    assert [(each.is_kept, each.why.split(",")[0]) for each in found["a"]] == [(True, "kept: no head has claimed it")]
    assert free_on(site.nodes, finished, NOBODYS, found) == {"a": [], "b": [run_path(RUN)]}


def test_what_was_moved_aside_is_listed_and_kept(site: Site, finished: list[FinishedRun]) -> None:
    aside = site.scratch("a") / set_aside_path(RUN) / "step-00000004.0123abcd"
    aside.mkdir(parents=True)
    (aside / "left.pt").write_bytes(bytes(100))
    found = found_on(site, finished)
    assert [(each.place, each.size) for each in found["a"] if each.is_kept] == [(set_aside_path(RUN), 100)]
    assert free_on(site.nodes, finished, NOBODYS, found) == {host: [run_path(RUN)] for host in "ab"}
    assert (aside / "left.pt").exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1000)], ids=["missing", "cut short"])
def test_what_hosts_have_is_kept_where_the_heads_copy_lacks_a_file(
    site: Site, finished: list[FinishedRun], damage: Callable[[Path], None]
) -> None:
    assert not finished[0].fault
    file = next(site.checkpoints.glob("*/*optim_states.pt"))
    damage(file)
    (run,) = finished_runs(site.root)
    found = found_on(site, [run])
    assert all(each.is_kept and str(file) in each.why for host in "ab" for each in found[host])
    assert free_on(site.nodes, [run], NOBODYS, found) == {"a": [], "b": []}
    assert site.tag("a", 8).exists()


def test_a_flipped_bit_in_the_heads_copy_keeps_what_hosts_have(site: Site, finished: list[FinishedRun]) -> None:
    file = next(site.checkpoints.glob("*/*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    found = found_on(site, finished)
    (untouched,) = verified(finished, (), silent)
    (run,) = verified(finished, {RUN}, silent)
    assert not untouched.fault, "where nothing is to be freed, nothing is read"
    assert str(file) in run.fault
    assert free_on(site.nodes, [run], NOBODYS, found) == {"a": [], "b": []}
    assert site.tag("b", 8).exists()


def test_a_run_that_somebody_works_on_is_not_finished(site: Site, finished: list[FinishedRun]) -> None:
    with run_lock(site.checkpoints.parent):
        assert finished_runs(site.root) == []
        assert list(garbage_under(site.root)) == []


def test_what_came_by_now_to_be_used_is_not_freed(site: Site, finished: list[FinishedRun], tmp_path: Path) -> None:
    stage(site, tmp_path)
    let_go(site)
    found = found_on(site, [])
    stage(site, tmp_path)
    assert free_on(site.nodes, [], NOBODYS, found) == {"a": [], "b": []}
    assert (site.scratch("a") / PLACE / "train.bin").exists()


def send(site: Site, host: str, digest: str, hours_ago: float) -> Path:
    folder = site.scratch(host).parent / "code" / digest
    guard = folder / "infra/node/attempts/process_guard.py"
    guard.parent.mkdir(parents=True)
    guard.write_bytes(bytes(10))
    then = time.time() - 3600 * hours_ago
    os.utime(folder, (then, then))
    return folder


def test_code_that_was_sent_is_freed_when_nothing_uses_it(site: Site) -> None:
    unused, left, fresh, of_attempt, at_work = (
        send(site, "a", name, hours) for name, hours in (("0", 2), (".1.partial", 2), ("2", 0.5), ("3", 2), ("4", 2))
    )
    attempts = of_attempt.parents[1] / "attempts"
    (attempts / "id").mkdir(parents=True, mode=0o700)
    attempts.chmod(0o700)
    Attempt(attempts / "id", "id", RUN, 1, None, 60.0, code="3").write()
    sleeps = subprocess.Popen(["sleep", "60"], env={"PYTHONPATH": f"/:{at_work}"})
    try:
        found = found_on(site, [])
        assert [(each.place, each.size) for each in found["a"]] == [("code/.1.partial", 10), ("code/0", 10)]
        assert free_on(site.nodes, [], NOBODYS, {"a": [*found["a"], replace(found["a"][0], place="code/4")]})["a"] == [
            f"code/{left.name}",
            f"code/{unused.name}",
        ]
    finally:
        sleeps.kill()
        sleeps.wait()
    assert {path.name for path in fresh.parent.iterdir()} == {fresh.name, of_attempt.name, at_work.name}
    assert [each.place for each in found_on(site, [])["a"]] == ["code/4"]


def test_code_that_a_head_wants_by_now_is_not_freed(site: Site) -> None:
    folder = send(site, "a", "0", hours_ago=2)
    found = found_on(site, [])
    os.utime(folder)
    assert free_on(site.nodes, [], NOBODYS, found)["a"] == []
    assert folder.is_dir()


def test_under_the_root_only_what_is_older_than_a_whole_checkpoint_goes(
    site: Site, finished: list[FinishedRun]
) -> None:
    for name in (tag_of(4), tag_of(16), "removed-0123abcd", ".step-00000002.discarded", "a copy"):
        (site.checkpoints / name).mkdir()
    found = list(garbage_under(site.root))
    assert {Path(each.place).name for each in found} == {tag_of(4), "removed-0123abcd", ".step-00000002.discarded"}
    assert len(free_under(site.root, found)) == 3
    assert {path.name for path in site.checkpoints.iterdir()} == {tag_of(8), tag_of(16), "a copy"}

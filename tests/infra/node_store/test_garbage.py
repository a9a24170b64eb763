"""What no run needs is found and freed; what somebody may need is left, whoever that is."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.attempts.attempt import Attempt
from infra.node_store.collection import finished_runs, free_on, free_under, garbage_on, garbage_under
from infra.node_store.gather import gather
from infra.node_store.paths import run_place
from infra.node_store.pulling import listed
from infra.node_store.staging import release, stage_folder
from infra.run_lock import run_lock
from t5train.records import Checkpoint
from t5train.train.job import tag_of
from tests.infra.node_store.conftest import RUN, Site

PLACE = "shards/deadbeef"


@pytest.fixture
def finished(site: Site) -> list[str]:
    """The run has ended, and the head has its last checkpoint."""
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    run = site.checkpoints.parent
    Checkpoint(path=run, fingerprint="f00df00df00dcafe", step=8, tag=tag_of(8), files={}).commit()
    return finished_runs(site.root)


def stage(site: Site, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(1000))
    stage_folder(site.nodes, tmp_path, listed(tmp_path, ["train.bin"]), PLACE, RUN)


def test_a_finished_run_and_what_no_run_uses_are_freed_on_all_nodes(
    site: Site, finished: list[str], tmp_path: Path
) -> None:
    assert finished == [RUN]
    stage(site, tmp_path)
    found = garbage_on(site.nodes, finished)
    assert [[each.place for each in found[host]] for host in "ab"] == [[run_place(RUN)]] * 2, "shards are pinned"
    release(site.nodes, RUN)
    found = garbage_on(site.nodes, finished)
    assert [[(each.place, each.size) for each in found[host]][:1] for host in "ab"] == [[(PLACE, 1000)]] * 2
    assert free_on(site.nodes, finished, found) == {host: [PLACE, run_place(RUN)] for host in "ab"}
    assert not any((site.scratch(host) / place).exists() for host in "ab" for place in (PLACE, run_place(RUN)))


def test_a_run_that_this_head_does_not_know_is_left(site: Site, finished: list[str]) -> None:
    assert garbage_on(site.nodes, []) == {"a": [], "b": []}
    assert garbage_on(site.nodes, ["smoke-0123456789ab"]) == {"a": [], "b": []}


def test_a_run_that_somebody_works_on_is_not_finished(site: Site, finished: list[str]) -> None:
    with run_lock(site.checkpoints.parent):
        assert finished_runs(site.root) == []
        assert list(garbage_under(site.root)) == []


def test_what_came_by_now_to_be_used_is_not_freed(site: Site, finished: list[str], tmp_path: Path) -> None:
    stage(site, tmp_path)
    release(site.nodes, RUN)
    found = garbage_on(site.nodes, [])
    stage(site, tmp_path)
    assert free_on(site.nodes, [], found) == {"a": [], "b": []}
    assert (site.scratch("a") / PLACE / "train.bin").exists()


def send(site: Site, host: str, digest: str, hours_ago: float) -> Path:
    folder = site.scratch(host).parent / "code" / digest
    (folder / "infra").mkdir(parents=True)
    (folder / "infra/guard.py").write_bytes(bytes(10))
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
        found = garbage_on(site.nodes, [])
        assert [(each.place, each.size) for each in found["a"]] == [("code/.1.partial", 10), ("code/0", 10)]
        assert free_on(site.nodes, [], {"a": [*found["a"], replace(found["a"][0], place="code/4")]})["a"] == [
            f"code/{left.name}",
            f"code/{unused.name}",
        ]
    finally:
        sleeps.kill()
        sleeps.wait()
    assert {path.name for path in fresh.parent.iterdir()} == {fresh.name, of_attempt.name, at_work.name}
    assert [each.place for each in garbage_on(site.nodes, [])["a"]] == ["code/4"]


def test_code_that_a_head_wants_by_now_is_not_freed(site: Site) -> None:
    folder = send(site, "a", "0", hours_ago=2)
    found = garbage_on(site.nodes, [])
    os.utime(folder)
    assert free_on(site.nodes, [], found)["a"] == []
    assert folder.is_dir()


def test_under_the_root_only_what_is_older_than_a_whole_checkpoint_goes(site: Site, finished: list[str]) -> None:
    for name in (tag_of(4), tag_of(16), "removed-0123abcd", ".step-00000002.discarded", "a copy"):
        (site.checkpoints / name).mkdir()
    found = list(garbage_under(site.root))
    assert {Path(each.place).name for each in found} == {tag_of(4), "removed-0123abcd", ".step-00000002.discarded"}
    assert len(free_under(site.root, found)) == 3
    assert {path.name for path in site.checkpoints.iterdir()} == {tag_of(8), tag_of(16), "a copy"}

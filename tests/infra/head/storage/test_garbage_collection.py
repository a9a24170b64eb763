"""Files that no run needs are found and freed. Files that any head or user may need are left."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
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
from t5train.spec.recipes import recipe
from tests.support.simulated_nodes import RUN, Site, flip_bit

SHARDS = "shards/deadbeef"


NO_ATTEMPTS = KnownAttempts()
THIS_OWNER = Owner("1" * 32, "this-head", "/shared/t5", "2026-01-01", 60.0)


@pytest.fixture
def finished(site: Site) -> list[FinishedRun]:
    """The run has ended, and the head has its last checkpoint."""
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    site.write_owner(THIS_OWNER)
    run = site.checkpoints.parent
    (run / "run.json").write_text(json.dumps({"unique_id": THIS_OWNER.unique_id}))
    files = digest_files(run, [str(path.relative_to(run)) for path in site.checkpoints.glob("*/*")])
    Checkpoint(path=run, fingerprint="f00df00df00dcafe", step=8, tag=tag_of(8), files=files).commit()
    return finished_runs(site.root)


def stage(site: Site, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(1000))
    nodes = replace(site.nodes, owner=THIS_OWNER.unique_id)
    stage_folder(nodes, tmp_path, listed(tmp_path, ["train.bin"]), SHARDS, RUN)


def release_run(site: Site) -> None:
    assert not any(release(replace(site.nodes, owner=THIS_OWNER.unique_id), RUN).values())


def found_on(site: Site, finished: list[FinishedRun], known: KnownAttempts = NO_ATTEMPTS) -> dict[str, list[Garbage]]:
    found = garbage_on(site.nodes, finished, known)
    assert not [each for each in found.values() if isinstance(each, HostError)]
    return found  # type: ignore[return-value]


def test_a_finished_run_and_unused_shards_are_freed(site: Site, finished: list[FinishedRun], tmp_path: Path) -> None:
    assert [run.name for run in finished] == [RUN]
    stage(site, tmp_path)
    found = found_on(site, finished)
    listed = [[each.relative_path for each in found[host]] for host in "ab"]
    assert listed == [[run_path(RUN)]] * 2, "shards of a run that was not released are pinned"
    release_run(site)
    found = found_on(site, finished)
    assert [[(each.relative_path, each.size) for each in found[host]][:1] for host in "ab"] == [[(SHARDS, 1000)]] * 2
    assert free_on(site.nodes, finished, NO_ATTEMPTS, found) == {host: [SHARDS, run_path(RUN)] for host in "ab"}
    assert not any((site.scratch(host) / path).exists() for host in "ab" for path in (SHARDS, run_path(RUN)))


def test_a_run_of_another_head_or_with_an_active_lease_is_kept(site: Site, finished: list[FinishedRun]) -> None:
    assert found_on(site, []) == {"a": [], "b": []}
    assert found_on(site, [replace(finished[0], name="smoke-0123456789ab")]) == {"a": [], "b": []}
    head_lease.begin(site.scratch("a") / run_path(RUN))
    assert [len(found) for found in found_on(site, finished).values()] == [0, 1]


def test_another_heads_run_of_the_same_name_and_settings_is_neither_listed_nor_freed(
    site: Site, finished: list[FinishedRun]
) -> None:
    before = found_on(site, finished)
    site.write_owner(replace(THIS_OWNER, unique_id="2" * 32, head="other-head"))
    assert found_on(site, finished) == {"a": [], "b": []}
    freed = free_on(site.nodes, finished, NO_ATTEMPTS, before)
    assert freed == {"a": [], "b": []}, "it was taken over after it was listed"
    assert site.tag("a", 8).exists()


def test_an_unclaimed_run_is_listed_and_kept(site: Site, finished: list[FinishedRun]) -> None:
    (site.scratch("a") / run_path(RUN) / "owner.json").unlink()
    found = found_on(site, finished)
    assert [(each.is_kept, each.why.split(",")[0]) for each in found["a"]] == [(True, "kept: no head has claimed it")]
    assert free_on(site.nodes, finished, NO_ATTEMPTS, found) == {"a": [], "b": [run_path(RUN)]}


def test_files_that_were_set_aside_are_listed_and_kept(site: Site, finished: list[FinishedRun]) -> None:
    aside = site.scratch("a") / set_aside_path(RUN) / "step-00000004.0123abcd"
    aside.mkdir(parents=True)
    (aside / "left.pt").write_bytes(bytes(100))
    found = found_on(site, finished)
    assert [(each.relative_path, each.size) for each in found["a"] if each.is_kept] == [(set_aside_path(RUN), 100)]
    assert free_on(site.nodes, finished, NO_ATTEMPTS, found) == {host: [run_path(RUN)] for host in "ab"}
    assert (aside / "left.pt").exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1000)], ids=["missing", "cut short"])
def test_hosts_keep_their_files_if_the_heads_copy_is_incomplete(
    site: Site, finished: list[FinishedRun], damage: Callable[[Path], None]
) -> None:
    assert not finished[0].fault
    file = next(site.checkpoints.glob("*/*optim_states.pt"))
    damage(file)
    (run,) = finished_runs(site.root)
    found = found_on(site, [run])
    assert all(each.is_kept and str(file) in each.why for host in "ab" for each in found[host])
    assert free_on(site.nodes, [run], NO_ATTEMPTS, found) == {"a": [], "b": []}
    assert site.tag("a", 8).exists()


def test_hosts_keep_their_files_if_the_heads_copy_has_a_flipped_bit(site: Site, finished: list[FinishedRun]) -> None:
    file = next(site.checkpoints.glob("*/*optim_states.pt"))
    flip_bit(file)
    found = found_on(site, finished)
    (untouched,) = verified(finished, (), silent)
    (run,) = verified(finished, {RUN}, silent)
    assert not untouched.fault, "files of a run that is not to be freed must not be read"
    assert str(file) in run.fault
    assert free_on(site.nodes, [run], NO_ATTEMPTS, found) == {"a": [], "b": []}
    assert site.tag("b", 8).exists()


def test_a_run_that_is_locked_does_not_count_as_finished(site: Site, finished: list[FinishedRun]) -> None:
    with run_lock(site.checkpoints.parent):
        assert finished_runs(site.root) == []
        assert list(garbage_under(site.root)) == []


def test_shards_that_are_in_use_again_are_not_freed(site: Site, finished: list[FinishedRun], tmp_path: Path) -> None:
    stage(site, tmp_path)
    release_run(site)
    found = found_on(site, [])
    stage(site, tmp_path)
    assert free_on(site.nodes, [], NO_ATTEMPTS, found) == {"a": [], "b": []}
    assert (site.scratch("a") / SHARDS / "train.bin").exists()


def send_code(site: Site, host: str, digest: str, hours_ago: float) -> Path:
    folder = site.scratch(host).parent / "code" / digest
    guard = folder / "infra/node/attempts/process_guard.py"
    guard.parent.mkdir(parents=True)
    guard.write_bytes(bytes(10))
    then = time.time() - 3600 * hours_ago
    os.utime(folder, (then, then))
    return folder


def test_shipped_code_is_freed_when_nothing_uses_it(site: Site) -> None:
    ages = {"0": 2, ".1.partial": 2, "2": 0.5, "3": 2, "4": 2, "5": 2}
    unused, partial, recent, of_attempt, in_use, requested = (send_code(site, "a", *age) for age in ages.items())
    attempts = of_attempt.parents[1] / "attempts"
    (attempts / "id").mkdir(parents=True, mode=0o700)
    attempts.chmod(0o700)
    Attempt(attempts / "id", "id", RUN, 1, None, 60.0, code="3").write()
    process = subprocess.Popen(["sleep", "60"], env={"PYTHONPATH": f"/:{in_use}"})
    try:
        found = found_on(site, [])
        listed = [(each.relative_path, each.size) for each in found["a"]]
        assert listed == [(f"code/{each.name}", 10) for each in (partial, unused, requested)]
        os.utime(requested)  # a head has just asked for it
        also_in_use = replace(found["a"][0], relative_path="code/4")
        freed = free_on(site.nodes, [], NO_ATTEMPTS, {"a": [*found["a"], also_in_use]})["a"]
        assert freed == [f"code/{partial.name}", f"code/{unused.name}"]
    finally:
        process.kill()
        process.wait()
    kept = {each.name for each in (recent, of_attempt, in_use, requested)}
    assert {path.name for path in recent.parent.iterdir()} == kept
    assert [each.relative_path for each in found_on(site, [])["a"]] == ["code/4"]


def test_under_the_root_only_files_older_than_a_checkpoint_are_freed(site: Site, finished: list[FinishedRun]) -> None:
    for name in (tag_of(4), tag_of(16), "removed-0123abcd", ".step-00000002.discarded", "a copy"):
        (site.checkpoints / name).mkdir()
    found = list(garbage_under(site.root))
    old = {tag_of(4), "removed-0123abcd", ".step-00000002.discarded"}
    assert {Path(each.relative_path).name for each in found} == old
    assert len(free_under(site.root, found)) == 3
    assert {path.name for path in site.checkpoints.iterdir()} == {tag_of(8), tag_of(16), "a copy"}


def test_copies_of_models_are_freed_if_all_runs_have_begun_and_none_starts_from_them(tmp_path: Path) -> None:
    starts, runs = tmp_path / "starts", tmp_path / "runs"
    for name in ("weights@1", "vocabulary@1", "unused@1", "a user's"):
        (starts / name).mkdir(parents=True)
        (starts / f".{name}.json").write_text(json.dumps({"folder": name}))
        if name != "a user's":
            (starts / name / "remote-start.json").write_text("{}")
    (starts / ".half@1.discarded").mkdir()
    for setting, name in {"model.start_from": "weights@1", "tokenizer.path": "vocabulary@1"}.items():
        spec = recipe("smoke").with_settings({setting: str(starts / name)})
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text(json.dumps({"spec": spec.model_dump(mode="json")}))
    (runs / "prepared").mkdir()
    assert not list(garbage_under(tmp_path))
    (runs / "prepared").rmdir()
    found = list(garbage_under(tmp_path))
    assert [each.relative_path for each in found] == ["starts/unused@1", "starts/.half@1.discarded"]
    left = {path.name for path in starts.iterdir()}
    assert len(free_under(tmp_path, found)) == 2
    assert left - {path.name for path in starts.iterdir()} == {"unused@1", ".unused@1.json", ".half@1.discarded"}
    (runs / "weights@1/run.json").write_text("{")
    assert not list(garbage_under(tmp_path))
